"""The files for Slurm, Kubernetes and containers: their form, and that every flag in them exists."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from evenstep import options

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
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


def instructions():
    """The instructions of the Dockerfile: [(word, the rest)], comments left out and lines put together."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_the_dockerfile_is_whole():
    found = instructions()
    words = [word for word, _ in found]
    assert set(words) <= {"FROM", "ARG", "ENV", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert words[0] == "FROM"
    rest = dict(found)
    assert (json.loads(rest["ENTRYPOINT"]), json.loads(rest["CMD"])) == (["evenstep"], ["--help"])
    # Nothing is done as root after USER, and that is another one.
    assert rest["USER"] not in ("root", "0")
    assert set(words[words.index("USER") + 1 :]) <= {"WORKDIR", "ENTRYPOINT", "CMD"}
    assert f"useradd --create-home --home-dir {rest['WORKDIR']} --uid 1000 {rest['USER']}" in str(found)
    for line in (line for word, line in found if word == "RUN"):
        assert subprocess.run(["sh", "-n"], input=line, text=True).returncode == 0


def test_the_dockerfile_copies_what_is_there_and_not_ignored():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for word, line in instructions() if word == "COPY" for source in line.split()[:-1]}
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)


def test_the_commands_for_docker_are_right():
    text = (ROOT / "Dockerfile").read_text() + (ROOT / "docs" / "containers.md").read_text()
    commands = re.findall(r"docker run (.*) evenstep train (.*)", text)
    assert len(commands) == 4
    for docker, flags in commands:
        assert "--init --shm-size=1g" in docker
        options.check_flags(flags.split())
    arguments = {line.partition("=")[0] for word, line in instructions() if word == "ARG"}
    assert set(re.findall(r"--build-arg (\w+)=", text)) <= arguments


def test_the_dev_container():
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert found["init"] is True
    assert "--shm-size=1g" in found["runArgs"]
    target = re.fullmatch(r"make (\w+)", found["postCreateCommand"])[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
