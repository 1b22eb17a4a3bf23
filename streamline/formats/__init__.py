"""Formats: bytes to items, without I/O."""
