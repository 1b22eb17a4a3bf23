from tests.servers.faults import faults, faulty_nginx
from tests.servers.nginx import nginx
from tests.serving import read, server

__all__ = ["faults", "faulty_nginx", "nginx", "read", "server"]
