"""Which precisions a device computes itself, what --precision auto takes, and that a run keeps it."""

import contextlib
import json
import re
import typing
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from evenstep import Loader, TrainState, cli, jobs, precision, train_step
from evenstep.bench import runs
from evenstep.config import ModelConfig
from evenstep.doctor.examine import DoctorOptions
from evenstep.doctor.machine import Check, check_precision
from evenstep.errors import ConfigError
from evenstep.precision import CHOICES, Support, cpu_instructions, settle, support, warning_of
from evenstep.testing import kill_at, run_ranks
from evenstep.world import World

NONE = "this CPU has no instructions for bf16"


def test_every_place_that_takes_a_precision_takes_the_same():
    for hints in (ModelConfig, DoctorOptions, TrainState.__init__):
        assert typing.get_args(typing.get_type_hints(hints)["precision"]) == CHOICES


@pytest.mark.parametrize(
    ("line", "bf16", "fp16"),
    [
        ("flags\t\t: fpu avx2", None, None),
        ("flags\t\t: fpu avx512f avx512vl avx512bw avx512dq", None, None),
        ("flags\t\t: fpu avx512f avx512_bf16", "avx512_bf16", None),
        ("flags\t\t: fpu avx512_bf16 avx512_fp16 amx_bf16", "amx_bf16", "avx512_fp16"),
        ("flags\t\t: fpu amx_bf16 amx_fp16 avx512_fp16", "amx_bf16", "amx_fp16"),
        ("Features\t: fp asimd asimdhp bf16", "bf16", "asimdhp"),
        ("Features\t: fp asimd", None, None),
    ],
)
def test_the_instructions_of_a_cpu(tmp_path, line, bf16, fp16):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\nbugs\t\t:\n\nprocessor\t: 1\n{line}\n")
    assert (cpu_instructions("bf16", cpuinfo), cpu_instructions("fp16", cpuinfo)) == (bf16, fp16)


def test_a_system_that_does_not_tell_has_no_instructions(tmp_path):
    assert cpu_instructions("bf16", tmp_path / "none") is None
    (tmp_path / "empty").write_text("processor\t: 0\n")
    assert cpu_instructions("bf16", tmp_path / "empty") is None


def test_onednn_is_asked():
    assert precision._is_in_onednn("bf16") == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert precision._is_in_onednn("fp16") == torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert precision._is_in_onednn("no_such_thing") is False  # as in a torch without it


def pretend(instructions, in_onednn):
    """Make the CPU of this process another one."""
    precision.cpu_instructions = lambda _: instructions
    precision._is_in_onednn = lambda _: in_onednn


@pytest.fixture
def cpu(monkeypatch):
    for name in ("cpu_instructions", "_is_in_onednn"):  # put back at the end
        monkeypatch.setattr(precision, name, getattr(precision, name))
    return pretend


@pytest.mark.parametrize(
    ("instructions", "in_onednn", "chosen", "reason", "cost"),
    [
        ("amx_bf16", True, "bf16", "this CPU has amx_bf16", ""),
        ("bf16", False, "fp32", "this CPU has bf16, but torch's oneDNN does not compute bf16", "ten times"),
        (None, True, "fp32", NONE, "oneDNN puts it together from fp32, which is slower or no faster"),
        (None, False, "fp32", NONE, "training net took about ten times as long as in fp32"),
    ],
)
def test_a_cpu_needs_instructions_and_onednn(cpu, instructions, in_onednn, chosen, reason, cost):
    cpu(instructions, in_onednn)
    found = support("bf16", "cpu")
    assert found.is_native == (chosen == "bf16")
    assert found.reason.startswith(reason)
    assert cost in found.cost
    assert settle("auto", torch.device("cpu")) == (chosen, found.reason)
    for asked in precision.PRECISIONS:
        assert settle(asked, "cpu") == (asked, "asked for")
    assert warning_of("fp32", "cpu") is warning_of("auto", "cpu") is None
    text = warning_of("bf16", "cpu")
    if chosen == "bf16":
        assert text is None
    else:
        assert text.startswith(f"precision bf16 is slow here: {found.reason}; {found.cost}. It stays bf16")
        assert "Use --precision fp32, or begin with --precision auto" in text


@pytest.mark.parametrize(
    ("capability", "hip", "bf16", "fp16", "advice"),
    [
        ((9, 0), None, True, True, None),
        ((8, 0), None, True, True, None),
        ((7, 5), None, False, True, "Use --precision fp16 or --precision fp32"),
        ((5, 2), None, False, False, "Use --precision fp32, or begin"),
        ((9, 4), "6.4", True, True, None),
    ],
)
def test_gpus(monkeypatch, capability, hip, bf16, fp16, advice):
    """With stand-ins for what torch says of a GPU."""
    major, minor = capability
    properties = SimpleNamespace(name="Some GPU", major=major, minor=minor)
    asked = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda d: contextlib.nullcontext(asked.append(d)))
    assert (support("bf16", "cuda:1").is_native, support("fp16", "cuda:1").is_native) == (bf16, fp16)
    assert set(asked) == {"cuda:1"}
    reason = "Some GPU computes bf16 itself"
    if not bf16:
        reason = f"Some GPU (compute capability {major}.{minor}) has no bf16 arithmetic"
    assert settle("auto", "cuda:1") == ("bf16" if bf16 else "fp32", reason)
    text = warning_of("bf16", "cuda:1")
    assert text is None if bf16 else advice in text


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match=r"precision is 'bf61'; choose auto, fp32, bf16 or fp16\. Did you"):
        settle("bf61", "cpu")
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="precision is 'half'; choose auto, fp32"):
        TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="half", world=World())


# Whole runs: of a linear layer, since bf16 may be slow here, on a CPU that each process pretends to have.
DATA = torch.utils.data.TensorDataset(torch.rand(24, 6), torch.arange(24) % 3)
AMX, PLAIN = ("amx_bf16", True), (None, False)


def train(world, steps, asked="auto", cpus=(AMX,)):
    """Train shortly; return what the state says of its precision, its weights and its outputs' dtype."""
    pretend(*cpus[min(world.rank + world.restart, len(cpus) - 1)])
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=asked)
    chosen, dtypes = (state.precision, state.precision_reason), set()

    def loss(model, batch):
        outputs = model(batch[0])
        dtypes.add(str(outputs.dtype))
        return nn.functional.cross_entropy(outputs, batch[1])

    for batch in Loader(DATA, 8).batches(state, epochs=3, steps=steps):
        train_step(state, batch, loss)
    if world.run_dir is not None:
        state.save(wait=True)
    assert state.numerics.precision == state.precision == state.manifest_meta()["numerics"]["precision"]
    assert state.scaler.is_enabled() == (state.precision == "fp16")
    return chosen, dtypes, model.weight.tolist(), world.restart


def test_auto_is_chosen_once_and_a_resumed_run_keeps_it(tmp_path):
    """Also on another machine, whose device would choose otherwise, and on several that would differ."""
    whole = run_ranks(train, 1, 8, lanes=2)[0]
    assert whole[:2] == (("bf16", "this CPU has amx_bf16"), {"torch.bfloat16"})
    assert run_ranks(train, 1, 8, "auto", (PLAIN,), lanes=2)[0][:2] == (("fp32", NONE), {"torch.float32"})
    options = {"lanes": 2, "run_dir": str(tmp_path)}
    run_ranks(train, 1, 4, **options)
    assert "precision bf16: this CPU has amx_bf16" in log_of(tmp_path)
    found = run_ranks(train, 2, 8, "auto", (PLAIN, AMX), resume=True, **options)
    for chosen, dtypes, weights, _ in found:
        assert chosen == ("bf16", "as the run began")
        assert dtypes == {"torch.bfloat16"}
        assert weights == whole[2]
    assert "WARNING" in log_of(tmp_path)
    assert f"precision bf16 is slow here: {NONE}" in log_of(tmp_path)
    assert "another numerics key" not in log_of(tmp_path)


def log_of(run_dir, rank=0):
    return (run_dir / "logs" / f"rank{rank}.log").read_text()


def test_auto_keeps_the_precision_of_a_run_in_fp16(tmp_path):
    run_ranks(train, 1, 3, "fp16", run_dir=str(tmp_path))
    (found,) = run_ranks(train, 1, 6, run_dir=str(tmp_path), resume=True)
    assert found[:2] == (("fp16", "as the run began"), {"torch.float16"})


@pytest.mark.parametrize("killed", [1, (0, 1)])
def test_a_restart_keeps_what_was_chosen(tmp_path, killed, capsys):
    """A snapshot of a survivor, or the newest checkpoint, has it: the devices are not asked again."""

    def main(world):
        first = world.restart == 0
        if first and killed != 1:
            train(world, 2)
        return train(world, 6, cpus=(AMX if first else PLAIN,))

    whole = run_ranks(train, 2, 6)[0]
    options = {} if killed == 1 else {"run_dir": str(tmp_path)}
    found = run_ranks(main, 2, fault=kill_at(killed, 4), **options)
    for chosen, _, weights, restart in found:
        assert (chosen, restart) == (("bf16", "as the run began"), 1)
        assert weights == whole[2]
    assert "went on from step" in (shown := capsys.readouterr().err)
    assert "is slow here" not in shown  # that is for the first start


@pytest.mark.parametrize(
    ("asked", "cpus", "told"),
    [
        (
            ("auto", "auto"),
            (AMX, PLAIN),
            f"rank 0 in bf16 (this CPU has amx_bf16) and rank 1 in fp32 ({NONE})",
        ),
        (("fp32", "bf16"), (AMX, AMX), "rank 0 in fp32 (asked for) and rank 1 in bf16 (asked for)"),
        (("auto", "fp16"), (PLAIN, PLAIN), f"rank 0 in fp32 ({NONE}) and rank 1 in fp16 (asked for)"),
    ],
)
def test_ranks_that_differ_are_an_error_that_names_both(asked, cpus, told):
    def main(world):
        with pytest.raises(ConfigError) as error:
            train(world, 1, asked[world.rank], cpus)
        return str(error.value)

    for text in run_ranks(main, 2):
        assert text == (
            f"the ranks would compute in different precisions: {told}. It changes the bits, so it must be "
            "the same everywhere. Give all of them the same --precision; every device computes "
            "--precision fp32."
        )


def test_a_precision_that_was_asked_for_stays_and_is_warned_of_once(tmp_path, capsys):
    found = run_ranks(train, 2, 1, "bf16", (PLAIN,), run_dir=str(tmp_path))
    assert [chosen for chosen, *_ in found] == [("bf16", "asked for")] * 2
    shown = capsys.readouterr().err
    assert shown.count(f"WARNING: precision bf16 is slow here: {NONE}") == 1
    assert log_of(tmp_path, rank=1).count("precision bf16 is slow here") == 1
    run_ranks(train, 2, 1, "bf16", (AMX,))
    run_ranks(train, 2, 1, "auto", (PLAIN,))
    assert "WARNING" not in capsys.readouterr().err


# The command.
@pytest.fixture
def evenstep(capsys, tmp_path, monkeypatch):
    """Runs the command with a model of the user's; returns its JSON and what it says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flat_model.py").write_text(
        "import torch\n\ndef make(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, num_classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(command, *words):
        flags = () if command == "eval" else ("--threads", "1")
        assert cli.main([command, "--device", "cpu", "--json", *flags, *map(str, words)]) == 0
        out, err = capsys.readouterr()
        return json.loads(out.splitlines()[-1]), err

    return run


NEW = ("--data", "digits", "--model", "flat_model:make", "--nproc", 1, "--lanes", 1, "--run-dir", "run")


def stored(tmp_path):
    """Return the precision in config.toml, and in the newest manifest's config and numerics key."""
    text = max((tmp_path / "run" / "checkpoints").glob("*/manifest.json")).read_text()
    return (
        re.search(r'^precision = "(.*)"$', (tmp_path / "run" / "config.toml").read_text(), re.M)[1],
        *(
            re.search(rf'"{group}": {{[^}}]*"precision": "(\w+)"', text)[1]
            for group in ("config", "numerics")
        ),
    )


def test_the_command_shows_and_keeps_what_auto_stands_for(evenstep, tmp_path):
    chosen, reason = settle("auto", "cpu")
    values, shown = evenstep("train", *NEW, "--steps", 2, "--precision", "auto")
    assert f"  precision {chosen}: {reason} (--precision auto)\n" in shown
    assert values["numerics"]["precision"] == chosen
    assert stored(tmp_path) == (chosen,) * 3
    sources = json.loads((tmp_path / "run" / "sources.json").read_text())
    assert sources["precision"] == "flag"


def test_a_resume_of_the_command_keeps_the_precision(evenstep, tmp_path):
    _, shown = evenstep("train", *NEW, "--steps", 2, "--precision", "bf16")
    is_native = support("bf16", "cpu").is_native
    assert ("WARNING: precision bf16 is slow here" in shown) == (not is_native)
    values, shown = evenstep("train", "--resume", "--run-dir", "run", "--steps", 3)
    assert stored(tmp_path) == ("bf16",) * 3
    assert ("WARNING: precision bf16 is slow here" in shown) == (not is_native)
    values, shown = evenstep("train", "--resume", "--run-dir", "run", "--steps", 4, "--precision", "auto")
    assert "  precision bf16: as the run began (--precision auto)\n" in shown
    assert values["numerics"]["precision"] == "bf16"
    assert stored(tmp_path) == ("bf16",) * 3
    again, shown = evenstep("eval", "--run-dir", "run")
    assert again["test_loss"] == values["test_loss"]
    assert ("WARNING: precision bf16 is slow here" in shown) == (not is_native)
    # A config.toml that says auto, as one that was written by hand: the checkpoint knows.
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('precision = "bf16"', 'precision = "auto"'))
    assert evenstep("eval", "--run-dir", "run")[0]["test_loss"] == values["test_loss"]


@pytest.mark.parametrize(
    ("asked", "device", "instructions", "expected"),
    [
        ("fp32", "cpu", "avx512_bf16", "this CPU has avx512_bf16: --precision bf16, or auto, is faster"),
        ("fp32", "cpu", None, None),
        ("fp32", "cuda", "avx512_bf16", None),
        ("bf16", "cpu", "avx512_bf16", None),
        ("auto", "cpu", "avx512_bf16", "because (--precision auto)"),
    ],
)
def test_a_faster_precision_is_named_and_not_chosen(cpu, monkeypatch, asked, device, instructions, expected):
    cpu(instructions, instructions is not None)
    monkeypatch.setattr(precision, "_of_gpu", lambda *_: Support(True, "Some GPU computes bf16 itself"))
    state = SimpleNamespace(device=torch.device(device), precision_reason="because")
    found = jobs._precision_note(asked, state)
    assert found is None if expected is None else found.startswith(expected)


def test_bench_warns_before_it_begins(cpu):
    cpu(*PLAIN)

    def told(asked, gpus=()):
        lines = []
        config = SimpleNamespace(model=SimpleNamespace(precision=asked))
        bench = runs.Bench(
            rows=(), config=config, options={}, steps=1, drop=0, rounds=1, gpus=gpus, tell=lines.append
        )
        with pytest.raises(StopIteration):  # there are no rows to compare
            runs.run(bench)
        return lines

    (line,) = told("bf16")
    assert line.startswith(f"precision bf16 is slow here: {NONE}")
    assert told("auto") == told("fp32") == told("bf16", gpus=(0,)) == []


def test_doctor_says_what_is_computed_natively():
    def machine(*native):
        return lambda name, device: Support(
            name == "fp32" or (name, device) in native,
            f"{device} {'has' if (name, device) in native else 'lacks'} {name}",
        )

    both = machine(("bf16", "cpu"), ("fp16", "cpu"))
    text = "fp32, bf16, fp16 natively; cpu has bf16; cpu has fp16"
    assert check_precision("bf16", 0, both) == Check("precision", "green", text)
    none = "fp32 natively; cpu lacks bf16; cpu lacks fp16"
    for asked in ("fp32", "auto"):
        assert check_precision(asked, 0, machine()) == Check("precision", "green", none)
    check = check_precision("bf16", 0, machine())
    assert (check.status, check.found) == ("yellow", none)
    assert check.fix.startswith("Use --precision fp32, or begin with --precision auto")
    # Two GPUs, of which one does not.
    mixed = machine(("bf16", "cuda:0"), ("fp16", "cuda:0"), ("fp16", "cuda:1"))
    found = check_precision("fp32", 2, mixed).found
    assert found.startswith("fp32, fp16 natively; cuda:0 has bf16; cuda:1 lacks bf16")
