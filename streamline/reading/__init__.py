"""The functions that make a pipeline from files: `read_*`."""
