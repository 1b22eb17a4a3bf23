"""`sl.Ray` where Ray isn't installed: options are checked, and what is missing is named."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import cloudpickle
import pytest

import streamline as sl
from streamline.errors import PlanError


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # also where it is installed


def test_the_error_names_the_extra() -> None:
    words = r"sl\.Ray needs ray, which is not installed: pip install 'streamline-data\[ray\]'"
    pipe = sl.from_items(range(3)).shard(1)
    with pytest.raises(PlanError, match=words):
        pipe.open(backend=sl.Ray(1))
    with pytest.raises(PlanError, match=words), sl.Ray(1):
        pytest.fail("it was opened")
    assert words[:30].replace("\\", "") in str(pipe.check(backend=sl.Ray(1)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": 0}, r"Ray\(hosts\) is at least 1, got 0"),
        ({"hosts": (3, 2)}, r"Ray\(hosts\) is \(fewest, most\), got \(3, 2\): write \(2, 3\)"),
        ({"hosts": 1, "start_timeout_s": -1}, r"Ray\(start_timeout_s=\) is at least 0 seconds, got -1"),
        (
            {"hosts": 1, "scheduling_strategy": "PACK"},
            r"Ray\(scheduling_strategy=\) is 'SPREAD' or 'DEFAULT', or an .*",
        ),
    ],
)
def test_options_are_checked_where_they_are_written(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        sl.Ray(**options)


def test_a_backend_goes_to_the_workers_of_a_trainer() -> None:
    backend = sl.Ray((2, 8), num_cpus=0.5, resources={"data": 1}, runtime_env={"pip": ["a"]}, env={"A": "b"})
    assert pickle.loads(cloudpickle.dumps(backend)) == backend


def test_several_hosts_for_one_worker_are_refused() -> None:
    with pytest.raises(PlanError, match=r"Ray\(2\) over a pipeline without \.shard"):
        sl.from_items(range(3)).open(backend=sl.Ray(2))
