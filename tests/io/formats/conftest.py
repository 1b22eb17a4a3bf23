from tests.file_kit import put, slices
from tests.serving import read, server

__all__ = ["put", "read", "server", "slices"]
