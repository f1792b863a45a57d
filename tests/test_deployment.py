"""The files for Slurm and Kubernetes: their form, and that every flag in them exists."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from evenstep import options

EXAMPLES = Path(__file__).parent.parent / "examples"
MANIFESTS = sorted(EXAMPLES.glob("kubernetes/*.yaml"))
SCRIPTS = sorted(EXAMPLES.glob("slurm/*.sbatch"))


def documents():
    return [(path.name, each) for path in MANIFESTS for each in yaml.safe_load_all(path.read_text())]


def pods(document):
    """The pod specs in a manifest."""
    if document["kind"] == "PyTorchJob":
        return [replica["template"]["spec"] for replica in document["spec"]["pytorchReplicaSpecs"].values()]
    return [document["spec"]["template"]["spec"]] if document["kind"] == "Job" else []


def check_flags(text):
    """Check the flags of the ``evenstep train`` in a shell command."""
    command = text[text.index("evenstep train") + len("evenstep train") :].replace("\\\n", " ")
    words = shlex.split(command.splitlines()[0])
    options.check_flags([word for word in words if word not in ("${resume[@]}", "$@")])


@pytest.mark.parametrize(("name", "document"), documents())
def test_manifests_have_what_kubernetes_requires(name, document):
    kinds = {"PyTorchJob": "kubeflow.org/v1", "Job": "batch/v1", "Service": "v1"}
    assert document["apiVersion"] == kinds[document["kind"]]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", document["metadata"]["name"])
    for spec in pods(document):
        assert spec.get("restartPolicy", "Never") in ("Never", "OnFailure")
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {"name", "image", "command", "args", "resources"} <= set(container)
            assert all(isinstance(word, str) for word in container["command"] + container["args"])
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            check_flags(" ".join(container["command"] + container["args"]))


def test_a_pytorchjob_has_a_master_and_the_operators_container():
    (job,) = [document for _, document in documents() if document["kind"] == "PyTorchJob"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    assert all(replica["restartPolicy"] in ("Never", "OnFailure") for replica in replicas.values())
    assert all(pod["containers"][0]["name"] == "pytorch" for pod in pods(job))


def test_the_elastic_job_meets_at_its_first_pod():
    service, job = (document for name, document in documents() if name == "elastic.yaml")
    spec = job["spec"]["template"]["spec"]
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert job["spec"]["completionMode"] == "Indexed"
    (port,) = (each["port"] for each in service["spec"]["ports"])
    endpoint = f"{job['metadata']['name']}-0.{spec['subdomain']}:{port}"
    assert f"--rdzv-endpoint {endpoint} " in spec["containers"][0]["args"][0]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_for_slurm(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    check_flags(path.read_text().partition("\nsrun ")[2])
