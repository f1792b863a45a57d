"""evenstep doctor: every planted fault is named together with its fix, and a machine in order is green."""

import io
import json
import os
import pwd
import resource
import socket
import subprocess
import sys
import textwrap
import types
import typing
from pathlib import Path

import pytest

from evenstep import devices, options, world
from evenstep.config import OptimConfig
from evenstep.devices import GpuProcess, GpuUse
from evenstep.doctor import code as code_checks
from evenstep.doctor import examine as doctor
from evenstep.doctor import machine as checks
from evenstep.doctor import ranks as rank_checks
from evenstep.doctor.examine import DoctorOptions
from evenstep.doctor.machine import Check, Driver
from evenstep.errors import ConfigError, MachineError
from evenstep.testing import run_ranks

GIB, MIB = 2**30, 2**20
GUARD = 'if __name__ == "__main__":'


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def disk(free, total=100 * GIB):
    return lambda path: types.SimpleNamespace(f_bavail=free, f_blocks=total, f_frsize=1)


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


# The eight planted faults.


def test_a_tiny_shared_memory():
    check = checks.check_shared_memory(200 * MIB, disk(60 * MIB, 64 * MIB))
    assert (check.name, check.status) == ("/dev/shm", "red")
    assert check.found == "60.0 MiB free of 64.0 MiB, this run may need 200.0 MiB"
    assert "docker run --shm-size=8g" in check.fix
    assert "fewer --workers" in check.fix
    default = checks.check_shared_memory(MIB, disk(60 * MIB, 64 * MIB))
    assert (default.status, "Docker's default" in default.fix) == ("yellow", True)
    assert checks.check_shared_memory(MIB, disk(GIB, GIB)).status == "green"


def test_no_disk_space(tmp_path):
    check = checks.check_disk(str(tmp_path / "runs" / "a"), GIB, 3, disk(4 * GIB))
    assert (check.name, check.status) == ("disk", "red")
    assert check.found == f"4.0 GiB free in {tmp_path}; 3 + 2 checkpoints of 1.0 GiB need 5.0 GiB"
    assert check.fix == "Free 1.0 GiB, choose another --run-dir, or keep fewer with --keep 1."
    assert checks.check_disk(str(tmp_path), GIB, 3, disk(7 * GIB)).status == "yellow"
    assert checks.check_disk(str(tmp_path), GIB, 3, disk(20 * GIB)).status == "green"


def test_a_taken_port():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = checks.check_port(port)
    assert (check.name, check.status) == ("port", "red")
    assert check.found == f"{port}: Address already in use, held by process {os.getpid()}"
    assert check.fix.startswith("Choose another one; on one machine unset MASTER_PORT")
    assert checks.check_port(port) == Check("port", "green", f"{port} is free")


def test_a_host_name_that_does_not_resolve():
    def fails(name, port):
        raise socket.gaierror(-2, "Name or service not known")

    check = checks.check_hostname(True, "node7", fails)
    assert (check.name, check.status) == ("host name", "red")
    assert check.found.startswith("node7 does not resolve: ")
    assert "Name or service not known" in check.found
    assert "/etc/hosts: 127.0.0.1 node7" in check.fix
    alone = checks.check_hostname(False, "node7", fails)
    assert (alone.status, "one machine does not need it" in alone.found) == ("yellow", True)


def test_more_threads_than_cores():
    check = checks.check_cores(4, 8, cores=16, quota=None)
    assert (check.name, check.status) == ("cores", "yellow")
    assert check.found == "4 x 8 threads on 16 cores"
    assert check.fix.endswith("--nproc 4 --threads 4")
    limited = checks.check_cores(4, 4, cores=16, quota=2.0)
    assert limited.found.endswith("(the container's limit is 2)")
    assert limited.fix.endswith("--nproc 2 --threads 1")
    assert checks.check_cores(4, 4, cores=16).status == "green"


@pytest.mark.parametrize(
    ("workers", "method", "status"), [(2, "spawn", "red"), (0, "spawn", "yellow"), (2, "fork", "yellow")]
)
def test_an_unpicklable_dataset(workers, method, status):
    check, _ = code_checks.check_data("planted:with_lambda", "data", workers, method)
    assert (check.name, check.status) == ("data", status)
    assert "the dataset.transform is a function (with_lambda.<locals>.<lambda>)" in check.found
    assert "cannot be pickled" in check.found
    assert check.fix.startswith("Make it a function of a module, or open it in __getitem__ at first use.")


def test_a_missing_guard(tmp_path):
    text = """
        import multiprocessing
        def main(): ...
        context = multiprocessing.get_context("spawn")
        context.Process(target=main).start()
    """
    check = code_checks.check_guard(script(tmp_path, text))
    assert (check.name, check.status) == ("guard", "red")
    assert "has no if __name__" in check.found
    assert "at line 5" in check.found
    assert "processes it starts with spawn" in check.found
    assert check.fix == f"Put line 5 and what follows under {GUARD}"


def test_another_torch_on_a_node():
    def main(here):
        mine = {"torch": "2.9.0" if here.rank == 1 else "2.14.1", "python": "3.11.7", "numpy": "2.4.0"}
        return rank_checks.check_versions(rank_checks.gather(here, mine))

    check, same = run_ranks(main, 2)
    assert check == same
    assert (check.name, check.status) == ("versions", "red")
    assert check.found == "torch 2.14.1 on rank 0, 2.9.0 on rank 1"
    assert check.fix.startswith("Install the same on every machine: pip install torch==2.14.1")


# More of the machine.


def test_a_torch_of_another_release_than_torchvision():
    have = {"python": "3.11.7", "evenstep": "1", "torch": "2.14.1+cu130", "torchvision": "0.28.0"}
    check = checks.check_torch(have)
    assert (check.status, check.fix) == (
        "yellow",
        "It goes with torchvision 0.29: pip install -U torch torchvision",
    )
    old = checks.check_torch({**have, "torch": "2.4.0"})
    assert (old.status, old.fix) == ("red", "evenstep needs torch 2.9: pip install -U torch torchvision")
    assert checks.check_torch({**have, "torchvision": "0.29.0"}).status == "green"


def test_a_torch_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    check = checks.check_torch()
    assert check.status == "red"
    assert check.found.startswith("torch cannot be imported: ")
    assert "pip install --force-reinstall torch" in check.fix


def test_backends(monkeypatch):
    import torch.distributed as dist

    assert "gloo" in checks.check_backends(0).found
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    assert checks.check_backends(0).status == "green"
    check = checks.check_backends(2)
    assert (check.status, check.found) == ("red", "gloo, but no nccl for the GPUs")
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    assert checks.check_backends(0).fix == "This torch has no gloo: install torch from pytorch.org."


def test_who_uses_the_gpus():
    busy = GpuUse(0, "GPU-0", 80 * GIB, 40 * GIB, (GpuProcess(17, "ann", 30 * GIB),))
    idle = GpuUse(1, "GPU-1", 80 * GIB, 0)
    check = checks.check_gpus(2, lambda: [busy, idle])
    assert check.status == "yellow"
    assert check.found.startswith("1 of 2 idle; GPU 0 (40.0 of 80.0 GiB in use) is held by pid 17 of ann")
    assert "--gpus idle" in check.fix
    assert checks.check_gpus(1, lambda: [idle]) == Check("GPUs", "green", "1, all idle")
    unseen = checks.check_gpus(0, lambda: [idle])
    assert (unseen.status, unseen.found) == ("red", "the driver shows 1, torch sees none")


def test_gpus_without_a_driver_to_ask():
    def fails():
        raise MachineError("install nvidia-ml-py")

    assert checks.check_gpus(0, fails).status == "green"
    check = checks.check_gpus(2, fails)
    assert (check.status, check.fix) == ("yellow", "install nvidia-ml-py")


@pytest.mark.parametrize(
    ("built_for", "num_gpus", "driver", "status", "text"),
    [
        ("13.0", 2, Driver("580.1", (13, 0)), "green", None),
        ("13.0", 2, Driver("550.1", (12, 4)), "red", "torch is built for CUDA 13.0: update the driver"),
        (None, 0, Driver("580.1", (13, 0)), "yellow", "built for the CPU"),
        ("13.0", 2, None, "yellow", "evenstep[gpu]"),
        ("13.0", 0, None, "green", None),
    ],
)
def test_the_driver(built_for, num_gpus, driver, status, text):
    check = checks.check_driver(built_for, num_gpus, lambda: driver)
    assert check.status == status
    assert check.fix is None if text is None else text in check.fix


def test_the_driver_is_asked_through_nvml(monkeypatch):
    module = types.ModuleType("pynvml")
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: b"580.65"
    module.nvmlSystemGetCudaDriverVersion_v2 = lambda: 13010
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert checks.query_driver() == Driver("580.65", (13, 1))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert checks.query_driver() is None


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), (None, None)]
)
def test_the_containers_limit_of_cores(text, quota, tmp_path):
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert checks.cpu_quota(tmp_path) == quota


def test_limits_of_the_user():
    def limits(files, tasks):
        return lambda kind: (files if kind == resource.RLIMIT_NOFILE else tasks, -1)

    assert checks.check_limits(2, 1, 0, limits(1024, -1), 50).status == "green"
    files = checks.check_limits(2, 1, 0, limits(64, -1), 50)
    assert (files.status, files.fix) == ("red", "ulimit -n 65536")
    assert "open files 64, processes unlimited; about 120 files are needed" in files.found
    tasks = checks.check_limits(2, 1, 4, limits(4096, 100), 50)
    assert tasks.status == "red"
    assert tasks.fix.startswith("ulimit -u 65536")


def test_a_disk_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check = checks.check_disk(str(tmp_path), 1, 1)
    assert (check.status, check.fix) == ("red", "Choose another --run-dir.")


def test_no_shared_memory_at_all():
    def missing(path):
        raise FileNotFoundError(2, "No such file or directory")

    check = checks.check_shared_memory(1, missing)
    assert check.found == "cannot be looked at: No such file or directory"
    assert check.fix.startswith("Mount it")


def test_the_port_of_the_environment(monkeypatch):
    assert checks.check_port(None) == Check("port", "green", "none given; one machine needs none")
    monkeypatch.setenv("MASTER_PORT", "http")
    check = checks.check_port(None)
    assert (check.status, check.found) == ("red", "MASTER_PORT is 'http'")


def test_a_name_server_that_does_not_answer():
    import threading

    answered = threading.Event()

    def slow(name, port):
        answered.wait(30)
        return []

    check = checks.check_hostname(False, "node7", slow, timeout_s=0.05)
    answered.set()
    assert "no answer within 0.05 s" in check.found


def test_a_peer():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        peer = f"127.0.0.1:{listening.getsockname()[1]}"
        assert checks.check_peer(peer) == Check("peer", "green", f"{peer} answers")
    check = checks.check_peer(peer)
    assert check.status == "red"
    assert f"{peer} cannot be reached: " in check.found
    assert "firewall" in check.fix
    with pytest.raises(ConfigError, match="peer is 'node1'; expected host:port"):
        checks.check_peer("node1")


def test_sizes_for_people():
    assert [checks.size(n) for n in (12, 1536, 3 * MIB, 5 * 2**40)] == [
        "12 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 TiB",
    ]


# The user's code.


def test_every_optimizer_of_training_can_be_examined():
    hints = typing.get_type_hints
    names = typing.get_args(hints(OptimConfig)["optimizer"])
    assert typing.get_args(hints(DoctorOptions)["optimizer"]) == names
    sizes = {name: code_checks.check_model("net", name)[1] for name in names}
    assert sizes["sgd"] == sizes["muon"] < sizes["adam"] == sizes["adamw"]


def test_models():
    check, num_bytes = code_checks.check_model("net", "adam")
    assert check.status == "green"
    assert "157,578 parameters" in check.found
    assert num_bytes == 157578 * 4 * 3
    missing, _ = code_checks.check_model("planted:nothing", "sgd")
    assert missing.status == "red"
    assert "planted has no 'nothing'" in missing.fix
    raises, _ = code_checks.check_model("planted:broken", "sgd")
    assert "cannot be made: OSError: the disk with the data is not mounted" in raises.found
    locked, _ = code_checks.check_model("planted:locked_model", "sgd")
    assert locked.status == "yellow"
    assert "the model.lock is a lock, which cannot be pickled" in locked.found


def test_data_that_is_in_order_or_cannot_be_opened():
    check, _ = code_checks.check_data("planted:plain", "data", 2, "spawn")
    assert (check.status, check.found) == ("green", "planted:plain: 10 training samples")
    broken, _ = code_checks.check_data("planted:broken", "data", 0)
    assert broken.status == "red"
    assert "OSError: the disk with the data is not mounted" in broken.found
    digits, num_bytes = code_checks.check_data("digits", "data", 0)
    assert digits.status == "green"
    assert num_bytes == 3 * 32 * 32 * 4


@pytest.mark.parametrize(
    ("text", "status", "found"),
    [
        ("def main(): ...\nif __name__ == '__main__':\n    main()\n", "green", "has if __name__"),
        ("import torch\nX = 3\ndef main(): ...\n", "green", "only defines things; it needs no guard"),
        ("import evenstep\ndef main(world): ...\nevenstep.launch(main)\n", "yellow", "runs code at line 3"),
        ("def main(:\n", "red", "cannot be read: SyntaxError"),
    ],
)
def test_guards(tmp_path, text, status, found):
    check = code_checks.check_guard(script(tmp_path, text))
    assert check.status == status
    assert found in check.found


def test_without_a_guard_launch_is_fine_and_it_says_when_it_is_not(tmp_path):
    check = code_checks.check_guard(script(tmp_path, "import evenstep\nevenstep.launch(print)\n"))
    assert "evenstep.launch needs none; DataLoader workers started by spawn or forkserver do." in check.fix


def test_what_a_script_defines(tmp_path):
    lock = f"""
        from __future__ import annotations
        import threading
        from dataclasses import dataclass
        lock = threading.Lock()

        @dataclass
        class Options:
            lr: float = 0.1

        def main(world):
            with lock:
                return Options()

        {GUARD}
            raise SystemExit("never run")
    """
    check = code_checks.check_script(script(tmp_path, lock))
    assert check.status == "red"
    assert "main: its global 'lock' is a lock, which cannot be pickled" in check.found
    assert check.fix.startswith("Make this object inside the function that needs it")
    fine = lock.replace("threading.Lock()", "None")
    assert code_checks.check_script(script(tmp_path, fine)).status == "green"
    fails = code_checks.check_script(script(tmp_path, "import nowhere\n"))
    assert (fails.status, "ModuleNotFoundError: No module named 'nowhere'" in fails.found) == ("red", True)
    assert "evenstep_doctor_script" not in sys.modules


def test_a_script_without_a_guard_is_not_run(tmp_path):
    check = code_checks.check_script(script(tmp_path, "raise SystemExit(print('run'))\n"))
    assert check.status == "yellow"
    assert "was not run: it has no guard" in check.found


# Between processes.


def test_links_and_clocks_between_processes():
    def main(here):
        ahead = rank_checks.clock_offsets(here, lambda: world_clock() + 7.0 * here.rank)
        return ahead, rank_checks.measure_links(here, 2**16)

    def world_clock():
        import time

        return time.time()

    results = run_ranks(main, 3)
    assert results[0] == results[1] == results[2]
    offsets, links = results[0]
    assert [round(offset) for offset in offsets] == [0, 7, 14]
    assert [(link.first, link.second) for link in links] == [(0, 1), (0, 2), (1, 2)]
    assert all(link.bytes_per_s > 0 for link in links)


def test_a_clock_that_is_wrong():
    check = rank_checks.check_clocks([0.0, 0.01, -7.0], 2)
    assert (check.status, check.found) == ("yellow", "rank 2 is -7.000 s from rank 0")
    assert "timedatectl set-ntp true" in check.fix
    assert rank_checks.check_clocks([0.0, 0.01], 2).status == "green"
    assert rank_checks.check_clocks([0.0], 1).found == "not checked: one machine has one clock"


def test_the_slowest_link():
    links = [rank_checks.Link(0, 1, 3e9), rank_checks.Link(0, 2, 0.5e9), rank_checks.Link(1, 2, 3e9)]
    check = rank_checks.check_links(links)
    assert check.status == "yellow"
    assert "median 3.00 GB/s, slowest 0.50 GB/s between ranks 0 and 2" in check.found
    assert "Every step waits for this link" in check.fix
    assert rank_checks.check_links(links[:1]).status == "green"
    assert rank_checks.check_links([]).found == "not measured: one process has none"


def test_versions_that_matter_less_and_another_python():
    less = rank_checks.check_versions([{"torch": "2", "numpy": "1"}, {"torch": "2", "numpy": "2"}])
    assert (less.status, less.found) == ("yellow", "numpy 1 on rank 0, 2 on rank 1")
    python = rank_checks.check_versions([{"torch": "2", "python": "3.10"}, {"torch": "2", "python": "3.11"}])
    assert python.status == "red"
    assert python.fix.startswith("Use the same Python on all.")
    assert rank_checks.check_versions([{"torch": "2"}] * 3).found == "all 3 processes: torch 2"


def test_other_machines_show_what_is_not_in_order():
    def main(here):
        import dataclasses

        def local(asked, nproc, num_gpus):
            assert nproc == 1
            return [Check("disk", "red" if here.rank else "green", f"of rank {here.rank}", "free some")]

        doctor.local_checks = local
        node = dataclasses.replace(here, num_nodes=2, node_rank=here.rank, local_rank=0, local_world_size=1)
        return doctor._on_a_rank(node, DoctorOptions(bandwidth=False))

    found = run_ranks(main, 2)[0]
    assert [(check.name, check.status, check.found) for check in found[:2]] == [
        ("disk", "green", "of rank 0"),
        ("node 1: disk", "red", "of rank 1"),
    ]
    names = {check.name: check for check in found[2:]}
    assert names.keys() == {"versions", "clocks", "links"}
    assert names["clocks"].found != "not checked: one machine has one clock"
    assert names["clocks"].status == "green"


# The command.


def test_the_options_are_checked():
    assert options.parse_doctor(["--nproc", "3", "--no-bandwidth"]) == DoctorOptions(nproc=3, bandwidth=False)
    with pytest.raises(ConfigError, match=r"unknown flag --ncpro. Did you mean '--nproc'"):
        options.parse_doctor(["--ncpro", "3"])
    with pytest.raises(ConfigError, match="keep is 0; it must be 1 or more, for example --keep 2"):
        DoctorOptions(keep=0)


FOUND = [Check("torch", "green", "2.14"), Check("/dev/shm", "red", "tiny", "make it larger")]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, out, found=FOUND, **flags):
    monkeypatch.setattr(doctor, "diagnose", lambda asked: found)
    code = doctor.run(DoctorOptions(**flags), out)
    return code, out.getvalue()


def test_lines_are_aligned_and_plain_without_a_terminal(monkeypatch):
    code, text = shown(monkeypatch, io.StringIO())
    assert code == 3
    assert text.splitlines() == [
        "green   torch     2.14",
        "red     /dev/shm  tiny",
        "                  fix: make it larger",
        "",
        "1 green, 1 red. The red ones will end a run: fix them first.",
    ]


def test_colours_on_a_terminal_unless_no_color(monkeypatch):
    _, text = shown(monkeypatch, Terminal())
    assert "\x1b[31mred   \x1b[0m  /dev/shm" in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(monkeypatch, Terminal())[1]


def test_nothing_red_is_success(monkeypatch):
    code, text = shown(monkeypatch, io.StringIO(), FOUND[:1])
    assert (code, text.splitlines()[-1]) == (0, "1 green. Nothing here will end a run.")


def test_json(monkeypatch):
    code, text = shown(monkeypatch, io.StringIO(), json=True)
    assert code == 3
    values = json.loads(text)
    assert values["ok"] is False
    assert values["checks"][1] == {
        "name": "/dev/shm",
        "status": "red",
        "found": "tiny",
        "fix": "make it larger",
    }


def test_a_bug_report_gives_nobody_away(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2secret")
    leak = f"held by {pwd.getpwuid(os.getuid()).pw_name} on {socket.gethostname()} in {Path.home()}"
    found = [*FOUND, Check("GPUs", "yellow", leak, leak)]
    _, text = shown(monkeypatch, io.StringIO(), found, bug_report=True)
    assert text.startswith("```\nversions   python 3.")
    assert "checks     torch green, /dev/shm red, GPUs yellow" in text
    assert "hunter2secret" not in text
    assert leak not in text
    assert str(Path.home()) not in text


def test_processes_that_do_not_start_are_a_red_line(monkeypatch):
    def fails(*_, **__):
        raise MachineError("no way")

    monkeypatch.setattr(doctor, "local_checks", lambda *_: FOUND[:1])
    monkeypatch.setattr("evenstep.launcher.launch", fails)
    check = doctor.diagnose(DoctorOptions(nproc=2))[-1]
    assert (check.name, check.status, check.found) == ("processes", "red", "2 do not start: no way")


def test_nothing_else_is_asked_of_a_broken_torch(monkeypatch):
    broken = Check("torch", "red", "broken", "install it")
    monkeypatch.setattr(checks, "check_torch", lambda: broken)
    assert doctor.local_checks(DoctorOptions(), 2, 0) == [broken]


def test_a_run_on_the_cpu_asks_nobody_about_gpus(monkeypatch):
    monkeypatch.setattr(checks, "check_gpus", lambda num: pytest.fail("asked"))
    found = doctor.diagnose(DoctorOptions(device="cpu", bandwidth=False))
    assert not {"GPUs", "driver"} & {check.name for check in found}


def test_every_flag_reaches_its_check(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    path = script(tmp_path, "import evenstep\nevenstep.launch(print)\n")
    asked = DoctorOptions(
        nproc=world.num_cores() + 1,
        data="planted:with_lambda",
        script=path,
        model="planted:locked_model",
        peer="127.0.0.1:9",
    )
    found = {check.name: check.status for check in doctor.local_checks(asked, asked.nproc, 0)}
    assert {name: found[name] for name in ("cores", "data", "guard", "script", "model", "peer")} == {
        "cores": "yellow",
        "data": "yellow",
        "guard": "yellow",
        "script": "yellow",
        "model": "yellow",
        "peer": "red",
    }


def test_the_command(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        command = [sys.executable, "-m", "evenstep", "doctor", "--nproc", "2", "--threads", "1", "--json"]
        command += ["--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 3, done.stderr
    statuses = {check["name"]: check["status"] for check in json.loads(done.stdout)["checks"]}
    assert "processes" not in statuses, done.stdout
    assert statuses["port"] == "red"
    assert (statuses["versions"], statuses["backends"], statuses["model"]) == ("green",) * 3
    assert "links" in statuses


@pytest.mark.slow
def test_under_torchrun_one_process_speaks(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "evenstep", "doctor", "--threads", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if " torch " in line and "built for" in line]) == 1
    assert any("all 2 processes: torch" in line for line in lines)


def test_devices_names_its_holders_for_others():
    assert devices.holders(3, GpuUse(3, "GPU-3", GIB, GIB)).endswith(
        "a process that the driver does not show"
    )
