from tests.file_kit import blocks, put, slices
from tests.servers.s3 import bucket, s3_endpoint
from tests.serving import read, server

__all__ = ["blocks", "bucket", "put", "read", "s3_endpoint", "server", "slices"]
