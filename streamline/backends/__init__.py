"""Where workers run: in the stream's own event loop, in threads, in processes, on other machines."""
