"""The command on disks that are full, read-only or lose data. Each script has mounts of its own."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
set -u
evenstep() { "$PYTHON" -m evenstep "$@"; echo "code $?"; }
train() {
    evenstep train --data digits --nproc 1 --lanes 2 --threads 1 --batch-size 64 --device cpu --steps 12 \\
        --cache-dir "$CACHE" --quiet --json "$@"
}
"""


def run_script(tmp_path, text):
    """Run a shell script with mounts of its own; return what it and evenstep wrote, in order."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no mount namespace")
    environment = {**os.environ, "PYTHON": sys.executable, "CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", SCRIPT + text],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.stdout


def results(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def codes(text):
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("code ")]


@pytest.mark.slow
def test_a_full_disk_and_a_file_cut_short_cost_no_bit(tmp_path):
    # One checkpoint of net has 1.3 MB, so two do not fit until the disk is made larger.
    text = run_script(
        tmp_path,
        """
        mkdir full
        mount -t tmpfs -o size=2m tmpfs full
        train --run-dir full/run --checkpoint-every-steps 3
        ls full/run/checkpoints
        mount -o remount,size=50m full
        train --run-dir full/run --resume
        ls -a full/run/checkpoints
        truncate -s 1000 full/run/checkpoints/step-00000012/model.safetensors
        evenstep checkpoint verify full/run
        train --run-dir full/run --resume
        evenstep checkpoint verify full/run
        train --run-dir undisturbed
        """,
    )
    assert codes(text) == [3, 0, 4, 0, 0, 0], text
    failed, _, rest = text.partition("code 3")
    assert "ERROR: cannot write the checkpoint" in failed  # the first failure: training goes on
    assert "step-00000006" in failed
    assert "its next checkpoint tries again" in failed
    assert "evenstep: error: cannot write the checkpoint" in failed  # the second in a row: the end
    assert "step-00000009" in failed
    assert "No space left" in failed or "space" in failed
    assert "The older checkpoints are untouched" in failed
    assert "--resume" in failed
    assert "Traceback" not in failed
    assert rest.split()[0] == "step-00000003"
    assert "skipping a damaged checkpoint" in rest
    assert "model.safetensors has 1,000 bytes" in rest
    resumed, repaired, undisturbed = results(rest)
    assert resumed["step"] == undisturbed["step"] == 12
    assert resumed["weights_sha256"] == repaired["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
def test_a_read_only_place_is_named(tmp_path):
    text = run_script(
        tmp_path,
        """
        mkdir -p run/checkpoints whole
        mount --bind run/checkpoints run/checkpoints
        mount -o remount,bind,ro run/checkpoints
        train --run-dir run --steps 2
        mount -t tmpfs -o ro tmpfs whole
        train --run-dir whole --steps 2
        """,
    )
    assert codes(text) == [3, 3], text
    first, second, _ = text.split("code 3")
    assert "evenstep: error: cannot write the checkpoint" in first
    assert "Read-only file system" in first
    assert "correct the permissions" in first
    assert "cannot write the run directory whole: Read-only file system" in second
    assert "--run-dir" in second
    assert "Traceback" not in text
