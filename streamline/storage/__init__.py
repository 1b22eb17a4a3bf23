"""Storages: what holds bytes under a path, behind one seam, `Storage`."""
