"""``evenstep doctor``: before a long run, what would slow it down or end it, and the fix.

Each check is a function of its own: of the machine (machine.py), of the user's code (code.py), between
processes (ranks.py). Here they get their arguments and their order, and become text.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from evenstep import world
from evenstep.doctor import machine
from evenstep.doctor.machine import Check
from evenstep.errors import ConfigError, EvenstepError
from evenstep.world import World

SAMPLE_BYTES = 3 * 32 * 32 * 4
"""Of an image of CIFAR-10 in float32; taken where a sample of the user's cannot be looked at."""
TIMEOUT_S = 30.0
COLORS = {"green": "\x1b[32m", "yellow": "\x1b[33m", "red": "\x1b[31m"}
PLAIN = "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Look for what would slow down or end a long run on this machine, and say the fix.

    Give it the flags of the run. Under torchrun or srun it compares the machines, too.
    """

    nproc: int | Literal["auto"] = "auto"
    """Processes on this machine, as for evenstep train."""
    lanes: int | None = None
    """Logical workers, as for evenstep train."""
    threads: int | None = None
    """CPU threads per process, as for evenstep train."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU, else cpu."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the forward pass, as for evenstep train."""
    workers: int = 0
    """DataLoader workers per process, as for evenstep train."""
    batch_size: int = 128
    """Samples per optimizer step, as for evenstep train."""
    model: str = "net"
    """net, resnet9, or module:callable."""
    optimizer: Literal["sgd", "adam", "adamw", "muon"] = "sgd"
    """Optimizer: its state is part of a checkpoint."""
    data: str | None = None
    """module:callable, to have it opened and pickled."""
    data_dir: str = "data"
    """As for evenstep train."""
    script: str | None = None
    """A script of your own that calls evenstep.launch. Its top is run if it has a __main__ guard."""
    run_dir: str = "runs"
    """Where checkpoints will be written."""
    keep: int = 3
    """How many checkpoints are kept."""
    port: int | None = None
    """The port for meeting that you will give to torchrun or --rdzv-endpoint. Default: MASTER_PORT."""
    peer: str | None = None
    """host:port of another machine that has to be reached."""
    bandwidth: bool = True
    """Start the processes and time an all-reduce between every two of them."""
    json: bool = False
    """Print one JSON object."""
    bug_report: bool = False
    """Print a block to paste into a bug report: no names of users, hosts or paths in it."""

    def __post_init__(self) -> None:
        for name, least in {
            "nproc": 1,
            "lanes": 1,
            "threads": 1,
            "workers": 0,
            "batch_size": 1,
            "keep": 1,
        }.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{name} is {value}; it must be {least} or more, for example {flag} {least + 1}."
                )


def diagnose(options: DoctorOptions) -> list[Check]:
    """Return what all checks found. Under torchrun every process must call; rank 0's answer is whole."""
    if world.placement() is not None:
        found: list[Check] = _launched(options, _on_a_rank, options)
        return found
    num_gpus = _num_gpus(options)
    nproc = _nproc(options, num_gpus)
    local = local_checks(options, nproc, num_gpus)
    if not options.bandwidth:
        return local
    try:
        between: list[Check] = _launched(options, _on_a_rank, None, nproc=nproc)
    except EvenstepError as error:
        fix = "This is what evenstep train would say, too. The red lines above may be the cause."
        between = [Check("processes", "red", f"{nproc} do not start: {error}", fix)]
    return local + between


def local_checks(options: DoctorOptions, nproc: int, num_gpus: int) -> list[Check]:
    """Return what the checks of this machine and of the user's code found.

    Args:
        options: the options.
        nproc: processes on this machine.
        num_gpus: GPUs that torch sees.
    """
    first = machine.check_torch()
    if first.status == "red":
        return [first]  # nothing else can be asked
    import torch

    from evenstep.doctor import code

    threads = options.threads or world.default_threads(options.lanes or nproc)
    model, checkpoint_bytes = code.check_model(options.model, options.optimizer)
    own: list[Check] = [model]
    sample_bytes = 0
    if options.data is not None:
        data, sample_bytes = code.check_data(options.data, options.data_dir, options.workers)
        own.append(data)
    if options.script is not None:
        own += [code.check_guard(options.script), code.check_script(options.script)]
    # A snapshot of each process; and each worker keeps two batches ready.
    batches = options.workers * 2 * options.batch_size * (sample_bytes or SAMPLE_BYTES)
    place = world.placement()
    many_nodes = options.peer is not None or (place is not None and place.num_nodes > 1)
    return [
        first,
        machine.check_backends(num_gpus),
        *([machine.check_gpus(num_gpus)] if options.device != "cpu" else []),
        *([machine.check_driver(torch.version.cuda, num_gpus)] if options.device != "cpu" else []),
        machine.check_precision(options.precision, num_gpus if options.device != "cpu" else 0),
        machine.check_cores(nproc, threads),
        machine.check_shared_memory(nproc * checkpoint_bytes + batches),
        machine.check_disk(options.run_dir, checkpoint_bytes, options.keep),
        # Under torchrun its port is taken: by itself.
        *([machine.check_port(options.port)] if place is None else []),
        machine.check_hostname(many_nodes),
        *([machine.check_peer(options.peer)] if options.peer is not None else []),
        machine.check_limits(nproc, threads, options.workers),
        *own,
    ]


def _on_a_rank(here: World, options: DoctorOptions | None) -> list[Check]:
    """Compare the ranks; with options (under torchrun) look at every machine first. Collective."""
    from evenstep.doctor import ranks

    own: list[Check] = []
    if options is not None and here.local_rank == 0:
        own = local_checks(options, here.local_world_size, _num_gpus(options))
    offsets = ranks.clock_offsets(here) if here.num_nodes > 1 else [0.0]
    versions = ranks.gather(here, machine.versions())
    links = ranks.measure_links(here) if options is None or options.bandwidth else []
    others = ranks.gather(here, (here.node_rank, own))
    # Of the other machines, what is not in order; rank 0's own checks are complete.
    foreign = [
        Check(f"node {node}: {check.name}", check.status, check.found, check.fix)
        for node, found in others
        for check in found
        if node != here.node_rank and check.status != "green"
    ]
    return [
        *own,
        *foreign,
        ranks.check_versions(versions),
        ranks.check_clocks(offsets, here.num_nodes),
        ranks.check_links(links),
    ]


def _launched(options: DoctorOptions, main: Any, *args: Any, nproc: int | None = None) -> Any:
    from evenstep.launcher import launch

    lanes = None if nproc is None else max(nproc, options.lanes or nproc)
    asked = {"threads": options.threads, "device": options.device, "timeout_s": TIMEOUT_S}
    return launch(main, *args, nproc=nproc or "auto", lanes=lanes, **asked)


def _num_gpus(options: DoctorOptions) -> int:
    if options.device == "cpu":
        return 0
    try:
        import torch
    except Exception:  # check_torch says what is wrong
        return 0
    return torch.cuda.device_count()


def _nproc(options: DoctorOptions, num_gpus: int) -> int:
    if options.nproc != "auto":
        return options.nproc
    found = num_gpus or min(world.num_cores(), 4)
    return min(found, options.lanes or found)


def text(found: Sequence[Check], *, color: bool) -> str:
    """Return the checks as aligned lines, each fix under its check, and a summary.

    Args:
        found: the machine.
        color: write the status in its colour.
    """
    wide = max(len(check.name) for check in found)
    lines = []
    for check in found:
        status = f"{check.status:<6}"
        shown = f"{COLORS[check.status]}{status}{PLAIN}" if color else status
        lines.append(f"{shown}  {check.name:<{wide}}  {check.found}")
        if check.fix is not None and check.status != "green":
            lines.append(f"{'':<{wide + 8}}  fix: {check.fix}")
    return "\n".join([*lines, "", summary(found)])


def summary(found: Sequence[Check]) -> str:
    """Return the last line: how many checks have which status."""
    counts = {status: sum(check.status == status for check in found) for status in COLORS}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{told}. " + (
        "The red ones will end a run: fix them first." if counts["red"] else "Nothing here will end a run."
    )


def bug_report(found: Sequence[Check]) -> str:
    """Return a block for a bug report: versions, the machine, and the status of each check.

    It is made of fixed fields and not of what the checks found, so no name of a user, a host or a path, and
    no value of an environment variable can be in it.
    """
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    quota = machine.cpu_quota()
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    driver = machine.query_driver()
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    rows = {
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions().items()),
        "torch": f"CUDA {torch.version.cuda}, {torch.backends.cpu.get_cpu_capability()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{world.num_cores()}, limit {'none' if quota is None else f'{quota:g}'}",
        "memory": f"{machine.size(memory)}, /dev/shm "
        + ("none" if shm is None else machine.size(shm.f_blocks * shm.f_frsize)),
        "GPUs": ", ".join(names) or "none",
        "driver": "none" if driver is None else f"{driver.version}, CUDA {driver.cuda[0]}.{driver.cuda[1]}",
        "processes": f"start method {multiprocessing.get_all_start_methods()[0]}",
        "checks": ", ".join(f"{check.name} {check.status}" for check in found),
    }
    return "\n".join(["```", *(f"{name:<9}  {row}" for name, row in rows.items()), "```"])


def run(options: DoctorOptions, out: TextIO | None = None) -> int:
    """Run all checks, print them, and return the exit code: 0, or 3 if one is red.

    Args:
        options: the options.
        out: where to print; by default stdout.
    """
    out = out or sys.stdout
    found = diagnose(options)
    place = world.placement()
    if place is not None and place.rank != 0:
        return 0
    failed = any(check.status == "red" for check in found)
    if options.bug_report:
        shown = bug_report(found)
    elif options.json:
        shown = json.dumps({"ok": not failed, "checks": [asdict(check) for check in found]})
    else:
        color = out.isatty() and not world.variable("NO_COLOR")
        shown = text(found, color=color)
    out.write(shown + "\n")
    out.flush()
    return 3 if failed else 0
