"""A job that writes shards is killed with SIGKILL at its operations, and resumed: see `killer`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.laws.profile import FACTOR, mostly_long
from tests.servers.s3 import Bucket

STEP = 1 if FACTOR > 1 else 3
"""Of the operations, which are struck: odd, since before and after a request take turns."""

KILLER = Path(__file__).with_name("killer.py")


def killed(
    folder: object,
    format: str,
    *,
    step: int = STEP,
    large: bool = False,
    options: Mapping[str, Any] | None = None,
    compression: str | None = None,
) -> int:
    """Kill a job at each operation; return how many there are."""
    job = {"folder": str(folder), "format": format, "step": step, "large": large, "storage_options": options}
    job["compression"] = compression
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(KILLER), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return int(done.stdout)


@pytest.mark.long
def test_on_disk_nothing_is_lost_and_nothing_comes_twice(tmp_path: Path) -> None:
    assert killed(tmp_path, "jsonl") > 40


@pytest.mark.long
@pytest.mark.parametrize("format", mostly_long(["parquet", "npy", "tar"], 3))
def test_other_formats_at_some_operations(tmp_path: Path, format: str) -> None:
    assert killed(tmp_path, format, step=3 * STEP, compression="zstd" if format == "tar" else None) > 40


@pytest.mark.long
def test_in_s3_nothing_is_lost_and_nothing_comes_twice(bucket: Bucket) -> None:
    assert killed(f"{bucket.url}/out", "jsonl", options=bucket.options) > 10


@pytest.mark.long
def test_in_azure_nothing_is_lost_and_nothing_comes_twice(container: Bucket) -> None:
    assert killed(f"{container.url}/out", "jsonl", options=container.options) > 10


@pytest.mark.long
def test_in_s3_an_upload_in_parts_is_killed_between_them(bucket: Bucket) -> None:
    assert killed(f"{bucket.url}/prepared", "jsonl", options=bucket.options, large=True) > 10
    client: Any = boto3.client(
        "s3",
        endpoint_url=bucket.options["endpoint"],
        region_name=bucket.options["region"],
        aws_access_key_id=bucket.options["access_key_id"],
        aws_secret_access_key=bucket.options["secret_access_key"],
    )
    name = bucket.url.removeprefix("s3://")
    left = client.list_multipart_uploads(Bucket=name)["Uploads"]
    docs = (KILLER.parents[3] / "docs" / "writing.md").read_text(encoding="utf-8")
    (told,) = re.findall("--lifecycle-configuration '(.+?)'", docs, re.DOTALL)
    rules = json.loads(told)
    client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration=rules)
    (rule,) = client.get_bucket_lifecycle_configuration(Bucket=name)["Rules"]
    client.close()
    assert rule == rules["Rules"][0]
    assert left
    assert all(upload["Key"].startswith(rule["Filter"]["Prefix"]) for upload in left)
