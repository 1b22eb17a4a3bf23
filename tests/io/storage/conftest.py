from tests.servers.azure import azure_endpoint, container
from tests.servers.faults import faults, faulty_nginx
from tests.servers.nginx import nginx
from tests.servers.s3 import bucket, s3_endpoint
from tests.servers.scripted_store import obstore_is_warm, scripted
from tests.serving import read, server

__all__ = [
    "azure_endpoint",
    "bucket",
    "container",
    "faults",
    "faulty_nginx",
    "nginx",
    "obstore_is_warm",
    "read",
    "s3_endpoint",
    "scripted",
    "server",
]
