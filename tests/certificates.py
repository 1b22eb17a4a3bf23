"""Folders with certificates, as tls= wants them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import trustme


def tls_folder(folder: Path, ca: trustme.CA | None = None, *, not_after: datetime | None = None) -> Path:
    """Write a certificate, its key, and that of the authority that has signed it; return `folder`."""
    ca = ca or trustme.CA()
    issued = ca.issue_cert("streamline", not_after=not_after)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tls.key").touch(mode=0o600)
    (folder / "tls.key").write_bytes(issued.private_key_pem.bytes())
    (folder / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (folder / "ca.crt").write_bytes(ca.cert_pem.bytes())
    return folder
