import os
import pwd
import sys
import types

import pytest

from evenstep import devices, guests
from evenstep.devices import Devices, GpuProcess, GpuUse, choose
from evenstep.errors import ConfigError, MachineError

GIB = 2**30


def gpu(index, used_gib=0.3, processes=()):
    return GpuUse(index, f"GPU-{index}abc", 80 * GIB, int(used_gib * GIB), tuple(processes))


BUSY = [
    gpu(0, 40, [GpuProcess(17, "ann", 30 * GIB), GpuProcess(18, "bob", None)]),
    gpu(1),
    gpu(2, 20),
    gpu(3),
]


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_auto_takes_all_gpus_or_the_cpu():
    assert choose(count=lambda: 2) == Devices("cuda", (0, 1), "2 visible to torch")
    chosen = choose(count=lambda: 0)
    assert (chosen.type, chosen.gpus, chosen.backend) == ("cpu", (), "gloo")
    assert chosen.reason == "there is no GPU that torch can use"


def test_cpu_is_taken_although_there_are_gpus():
    def count():
        raise AssertionError("nobody needs to count")

    assert choose("cpu", count=count).type == "cpu"


def test_each_process_has_its_gpu():
    chosen = choose(gpus="3,1", fraction=0.5, count=lambda: 4)
    assert [chosen.of(local_rank) for local_rank in range(3)] == ["cuda:3", "cuda:1", "cuda:3"]
    assert (chosen.backend, chosen.memory_fraction) == ("nccl", 0.5)
    assert chosen.reason == "asked for with --gpus 3,1"
    assert choose("cpu").of(1) == "cpu"


@pytest.mark.parametrize(
    ("device", "gpus", "kind", "message"),
    [
        ("gpu", None, ConfigError, "device is 'gpu'; expected auto, cpu or cuda"),
        ("cpu", "0", ConfigError, "--gpus 0 contradicts --device cpu"),
        ("auto", "one", ConfigError, "gpus is 'one'; expected numbers such as 0,1, or idle or idle:N"),
        ("auto", "1,1", ConfigError, "a GPU is named twice"),
        ("auto", "0,4", MachineError, "there is no GPU 4; torch sees 4, numbered 0 to 3"),
        ("auto", "idle:0", ConfigError, "expected idle or idle:N with a whole number N above 0"),
        ("auto", "idler", ConfigError, "expected idle or idle:N"),
    ],
)
def test_wrong_options(device, gpus, kind, message):
    with pytest.raises(kind, match=message):
        choose(device, gpus, count=lambda: 4, query=lambda: BUSY)


@pytest.mark.parametrize("asked", [("cuda", None, "--device cuda"), ("auto", "idle", "--gpus idle")])
def test_no_gpu_says_what_to_do(asked, monkeypatch):
    device, gpus, text = asked
    with pytest.raises(MachineError, match=f"{text}, but torch sees no GPU.*nvidia-smi.*use --device cpu"):
        choose(device, gpus, count=lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MachineError, match="CUDA_VISIBLE_DEVICES is ''; unset it"):
        choose(device, gpus, count=lambda: 0)


def test_this_machine_has_no_gpu_or_torch_counts_it():
    import torch

    chosen = choose()
    assert len(chosen.gpus) == torch.cuda.device_count()


def test_idle_takes_gpus_without_process_and_memory():
    assert choose(gpus="idle", count=lambda: 4, query=lambda: BUSY).gpus == (1, 3)
    assert choose(gpus="idle:1", count=lambda: 4, query=lambda: BUSY).gpus == (1,)


def test_too_few_idle_names_the_holders():
    with pytest.raises(MachineError) as error:
        choose(gpus="idle:3", count=lambda: 4, query=lambda: BUSY)
    text = str(error.value)
    assert "2 of 4 GPUs are idle, and 3 needed" in text
    assert "GPU 0 (40.0 of 80.0 GiB in use) is held by pid 17 of ann with 30.0 GiB, pid 18 of bob" in text
    assert "GPU 2 (20.0 of 80.0 GiB in use) is held by a process that the driver does not show" in text
    assert "--gpu-memory-fraction" in text


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("3,0,1", (0, 2)), ("GPU-3abc,GPU-0abc", (0,)), ("1,9,3", (0,))],
)
def test_idle_counts_within_cuda_visible_devices(visible, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose(gpus="idle", count=lambda: len(visible.split(",")), query=lambda: BUSY).gpus == gpus


def test_a_number_out_of_range_names_cuda_visible_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    with pytest.raises(MachineError, match="numbered 0 to 1 within CUDA_VISIBLE_DEVICES=5,6"):
        choose(gpus="5", count=lambda: 2)


GROW = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@pytest.fixture
def no_settings(monkeypatch):
    for name in (*GROW, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def test_other_libraries_are_kept_from_the_whole_gpu(no_settings):
    assert devices.variables(choose("cpu")) == GROW, "on the CPU, too: they would still find the GPUs"
    assert devices.variables(choose(count=lambda: 1)) == GROW
    idle = choose(gpus="idle", fraction=0.7, count=lambda: 4, query=lambda: BUSY)
    shared = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.7"}
    assert devices.variables(idle, 2) == GROW | shared


def test_what_the_user_has_set_for_other_libraries_stays(no_settings, monkeypatch):
    one = choose(fraction=0.5, count=lambda: 1)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.3")
    assert devices.variables(one) == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_processes_on_one_gpu_divide_its_share(no_settings):
    two = Devices("cuda", (0, 1), "", 0.6)
    assert [two.share_of(rank, 3) for rank in range(3)] == [0.3, 0.6, 0.3]
    assert [two.share_of(rank, 2) for rank in range(2)] == [0.6, 0.6]
    assert devices.variables(two, 4)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.3"
    assert Devices("cuda", (0,), "").share_of(0, 4) is None


def test_a_small_gpu_with_nothing_but_the_driver_on_it_is_idle():
    assert GpuUse(0, "GPU-0", 4 * GIB, 500 * 2**20).is_idle
    assert not GpuUse(0, "GPU-0", 4 * GIB, 700 * 2**20).is_idle


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
def test_a_share_is_a_share(fraction):
    with pytest.raises(ConfigError, match=f"gpu_memory_fraction is {fraction}; .*above 0 and at most 1"):
        choose("cpu", fraction=fraction)


def test_a_worker_takes_its_gpu_and_its_share(monkeypatch):
    import torch

    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: calls.append(share))
    monkeypatch.setattr(guests, "limit_tensorflow", lambda share, totals: calls.append(("tf", share)))
    devices.apply(Devices("cuda", (2, 5), "", 0.5), 1, 4)
    devices.apply(Devices("cuda", (2, 5), ""), 0)
    devices.apply(Devices("cpu", (), "", 0.25), 0)
    assert calls == ["cuda:5", 0.25, ("tf", 0.25), "cuda:2"]


def fake_nvml(**changes):
    """A stand-in for pynvml with one GPU that this process holds."""
    module = types.ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    own = types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=2 * GIB)

    def unsupported(handle):
        raise module.NVMLError("not supported")

    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=80 * GIB, used=3 * GIB),
        "nvmlDeviceGetUUID": lambda handle: b"GPU-0abc",
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [own],
        "nvmlDeviceGetGraphicsRunningProcesses": unsupported,
    }
    for name, function in {**functions, **changes}.items():
        setattr(module, name, function)
    return module


def test_the_drivers_answer_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    user = pwd.getpwuid(os.getuid()).pw_name
    mine = GpuProcess(os.getpid(), user, 2 * GIB)
    assert devices.query_nvml() == [GpuUse(0, "GPU-0abc", 80 * GIB, 3 * GIB, (mine,))]


def test_a_driver_that_does_not_answer_is_an_error(monkeypatch):
    module = fake_nvml()

    def fail():
        raise module.NVMLError("Driver Not Loaded")

    module.nvmlInit = fail
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(MachineError, match=r"driver does not answer \(Driver Not Loaded\)"):
        devices.query_nvml()


def test_idle_without_nvml_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MachineError, match=r"nvidia-ml-py.*pip install 'evenstep\[gpu\]'"):
        choose(gpus="idle", count=lambda: 1)


def test_a_process_that_is_gone_has_no_user():
    assert devices._user(2**22 + 1) == "unknown user"
