from tests.file_kit import put, slices
from tests.servers.s3 import bucket, s3_endpoint
from tests.serving import read, server

__all__ = ["bucket", "put", "read", "s3_endpoint", "server", "slices"]
