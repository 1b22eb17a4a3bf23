"""What holds bytes under a path: local files, HTTP, object stores, and a cache of them on disk."""
