from tests.servers.azure import azure_endpoint, container
from tests.servers.s3 import bucket, s3_endpoint
from tests.servers.scripted_store import obstore_is_warm, scripted

__all__ = ["azure_endpoint", "bucket", "container", "obstore_is_warm", "s3_endpoint", "scripted"]
