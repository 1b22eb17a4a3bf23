"""A file's bytes to items, from any place on; one format a file."""
