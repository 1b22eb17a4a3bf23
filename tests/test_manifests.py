"""The manifests for Kubernetes fit its schemas, and what they run is the command that there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click import Context

from streamline.cli import worker

FOLDER = Path(__file__).parent.parent / "examples" / "kubernetes"

MANIFESTS = sorted(FOLDER.glob("*.yaml"))

JOB_SET: dict[str, Any] = {
    "network": {"enableDNSHostnames": bool},
    "successPolicy": {"operator": str, "targetReplicatedJobs": list},
    "failurePolicy": {"maxRestarts": int},
    "replicatedJobs": list,
}
"""What these manifests use of JobSetSpec, of kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go."""


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def jobs(path: Path) -> Iterator[Any]:
    """Yield the Jobs of a manifest, those that a JobSet makes among them, as the controller names these."""
    for document in documents(path):
        if document["kind"] == "Job":
            yield document
        for made in document["spec"].get("replicatedJobs", []):
            assert made.keys() == {"name", "replicas", "template"}
            name = f"{document['metadata']['name']}-{made['name']}-0"
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **made["template"]}


def check_fits(found: Any, shape: Any) -> None:
    if isinstance(shape, dict):
        assert found.keys() == shape.keys()
        for name, part in shape.items():
            check_fits(found[name], part)
    else:
        assert type(found) is shape


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_fits_the_schemas_of_kubernetes(path: Path) -> None:
    plain = [document for document in documents(path) if document["kind"] != "JobSet"]
    checked = [*plain, *jobs(path)]
    assert {document["kind"] for document in checked} <= {"Job", "Service"}
    for document in checked:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_what_does_not_fit_is_found() -> None:
    (job, *_) = jobs(FOLDER / "jobset.yaml")
    job["spec"]["parallel"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="parallel"):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_a_job_set_names_only_what_there_is() -> None:
    (document,) = documents(FOLDER / "jobset.yaml")
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    check_fits(document["spec"], JOB_SET)
    names = [made["name"] for made in document["spec"]["replicatedJobs"]]
    assert set(document["spec"]["successPolicy"]["targetReplicatedJobs"]) <= set(names)
    assert document["spec"]["successPolicy"]["operator"] in ("All", "Any")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_agents_run_the_command_and_dial_the_trainer(path: Path) -> None:
    trainer, workers = jobs(path)
    (container,) = workers["spec"]["template"]["spec"]["containers"]
    program, command, *options = container["command"]
    assert (program, command) == ("streamline", "worker")
    with Context(worker) as context:
        worker.parse_args(context, list(options))
    host, _, port = context.params["connect"].partition(":")
    (serving,) = trainer["spec"]["template"]["spec"]["containers"]
    assert [int(port)] == [exposed["containerPort"] for exposed in serving["ports"]]
    if path.name == "jobset.yaml":
        assert host == f"{trainer['metadata']['name']}-0.training"  # pod 0 of that job, as JobSet's Network says
    else:
        (service,) = [document for document in documents(path) if document["kind"] == "Service"]
        assert host == service["metadata"]["name"]
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": trainer["metadata"]["name"]}
    # An exception ends the trainer's stream, as its last item does: agents are to be there when its next pod is.
    assert context.params["rejoin"] >= 600
    assert context.params["tls"] in [mount["mountPath"] for mount in container["volumeMounts"]]
    keys = [
        [variable for variable in one["env"] if variable["name"] == "STREAMLINE_KEY"] for one in (container, serving)
    ]
    assert keys[0] == keys[1] != []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_no_two_trainers_run_at_once(path: Path) -> None:
    """Without such a policy, a Job replaces a pod as soon as it is told to end, which may take its grace period."""
    trainer, _ = jobs(path)
    assert "podFailurePolicy" in trainer["spec"] or trainer["spec"]["backoffLimit"] == 0
