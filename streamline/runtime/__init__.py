"""One opened run: what it is resolved to, its streams, its event loop, pauses, `debug` and `check`."""
