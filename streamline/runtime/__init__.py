"""One opened run: its options, streams, event loop and pauses; `debug` and `check`."""
