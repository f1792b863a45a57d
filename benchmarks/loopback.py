"""The cost model of scaling.py on this machine: measured with gloo over loopback, fitted, and compared.

Run it with ``python benchmarks/scaling.py --calibrate``. Latencies and bandwidth are fitted to sums of 2 and
4 processes, and the wait for the last process to training steps of 4 on 2 cores; what the model then says of
8 is a prediction. Launches of 1, 2, 4 and 8 processes take turns. All ranks' times count alike.
"""

import dataclasses
import itertools
import json
import os
import statistics
import time

import numpy as np
import record
import reduce
import scaling
import torch
import torch.distributed as dist
from clusters import Machines, Work

from evenstep import Loader, TrainState, cross_entropy, launch, train_step
from evenstep.data.cache import ImageArrays
from evenstep.models import Net, num_parameters
from evenstep.world import World

WORLD_SIZES = (1, 2, 4, 8)
FITTED = (2, 4)
SIZES = (16 * 1024, 128 * 1024, 512 * 1024, 1024 * 1024, 4 * 1024 * 1024)
WAYS = {"all-reduce": scaling.ring, "gather": scaling.gather, "two-phase": scaling.two_phase}
BATCH = 32  # samples of one lane; there is one lane a process
STEPS = 10
MEETINGS = 2  # of all processes in a step of evenstep: after forward and after backward
INFINITE = float("inf")


def measure(world, sizes, sums):
    """Return on each rank ``{size: {way: [s, ...]}}``, and the seconds of training steps. Collective.

    The steps are those of a process for itself, all of them at once, and those of all together. The former
    begin together, each after a barrier: a process that is ahead would leave its core to the others.
    """
    found = reduce.times(world, sums, sizes) if world.world_size > 1 else {}
    meet = dist.barrier if world.world_size > 1 else None
    alone = steps(World(seed=world.seed, device=world.device, threads=world.threads), meet)
    return found, alone, steps(world) if world.world_size > 1 else alone


def steps(world, meet=None):
    """Return the seconds of some steps, of a lane of 32 samples a process; ``meet()`` comes before each."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = TrainState(model, optimizer, world=world)
    n = BATCH * world.world_size
    pixels = np.random.default_rng(0).integers(0, 256, (4 * n, 32, 32, 3), dtype=np.uint8)
    loader = Loader(ImageArrays(pixels, np.arange(4 * n) % 10), n, world=world)
    loss = cross_entropy()
    seconds = []
    for batch in loader.batches(state, steps=STEPS + 3):
        if meet is not None:
            meet()
        begun = time.perf_counter()
        train_step(state, batch, loss)
        seconds.append(time.perf_counter() - begun)
    state.lanes.close()
    return seconds[3:]


def adding():
    """Return (seconds that an addition takes to start, bytes a second), of one process alone."""
    small, large = torch.ones(16), torch.ones(4 * 1024 * 1024)
    times = {}
    for tensor, repeats in ((small, 2000), (large, 10)):
        other, samples = tensor.clone(), []
        for _ in range(7):
            begun = time.perf_counter()
            for _ in range(repeats):
                tensor.add_(other)
            samples.append((time.perf_counter() - begun) / repeats)
        times[tensor.numel()] = statistics.median(samples)
    return times[small.numel()], large.numel() * large.element_size() / times[large.numel()]


def predicted_s(machines, way, n, world_size):
    """Return what the model says of one sum."""
    return sum(WAYS[way](scaling.crowded(machines, world_size), n, world_size).values())


def fitted(measured, cores, launch_s, added_bytes_per_s):
    """Return the Machines whose predictions are nearest to the measured sums of a few processes.

    The call, the hop, the wait for a turn and the byte are fitted, by least squares of errors relative to the
    geometric mean of measurement and prediction, so that twice and half as much count alike. Additions are
    measured apart; a further message costs nothing, because gloo sends them all at once.

    Args:
        measured: ``{world_size: {size: {way: seconds}}}``.
        cores: that the processes share.
        launch_s: what ``adding`` measured.
        added_bytes_per_s: likewise.
    """
    none = Machines("", 10**6, 0.0, 0.0, 0.0, 0.0, INFINITE, INFINITE, INFINITE, 0.0, cores)
    known = dataclasses.replace(none, launch_s=launch_s, added_bytes_per_s=added_bytes_per_s)
    units = [
        dataclasses.replace(none, **unit)
        for unit in ({"call_s": 1.0}, {"inside_s": 1.0}, {"turn_s": 1.0}, {"inside_bytes_per_s": 1.0})
    ]
    cases = list(itertools.product(FITTED, SIZES, WAYS))
    values = np.array([measured[w][size][way] for w, size, way in cases])
    rest = values - [predicted_s(known, way, size, w) for w, size, way in cases]
    rows = np.array([[predicted_s(unit, way, size, w) for unit in units] for w, size, way in cases])
    weights = 1 / values
    for _ in range(20):
        found = _not_negative(rows * weights[:, None], rest * weights)
        weights = 1 / np.sqrt(values * np.maximum(rows @ found + values - rest, values / 100))
    call_s, inside_s, turn_s, byte_s = (float(f"{value:.2g}") for value in found)
    return dataclasses.replace(
        none,
        name=f"gloo over loopback, {cores} cores",
        call_s=call_s,
        inside_s=inside_s,
        turn_s=turn_s,
        inside_bytes_per_s=float(f"{1 / byte_s:.2g}"),
        added_bytes_per_s=float(f"{added_bytes_per_s:.2g}"),
        launch_s=float(f"{launch_s:.2g}"),
    )


def _not_negative(rows, values):
    """Return the least squares with no negative unknown: of all sets of unknowns that are 0, the best."""
    best, least = np.zeros(rows.shape[1]), INFINITE
    for used in itertools.product((False, True), repeat=rows.shape[1]):
        if not used[-1]:  # bytes are not for nothing
            continue
        solution = np.zeros(rows.shape[1])
        solution[list(used)] = np.linalg.lstsq(rows[:, list(used)], values, rcond=None)[0]
        error = float(((rows @ solution - values) ** 2).sum())
        if (solution >= 0).all() and error < least:
            best, least = solution, error
    return best


def calibrate(rounds):
    """Measure, fit, compare, print and keep."""
    sums = {w: {size: {way: [] for way in WAYS} for size in SIZES} for w in WORLD_SIZES if w > 1}
    alone, together = ({w: [] for w in WORLD_SIZES} for _ in range(2))
    loads = [os.getloadavg()[0]]
    for number in range(rounds):
        for world_size in WORLD_SIZES if number % 2 == 0 else WORLD_SIZES[::-1]:
            options = {"nproc": world_size, "threads": 1, "device": "cpu", "all_values": True}
            for found, *seconds in launch(measure, SIZES, 10, **options):
                alone[world_size] += seconds[0]
                together[world_size] += seconds[1]
                for size, ways in found.items():
                    for way, samples in ways.items():
                        sums[world_size][size][way] += samples
        loads.append(os.getloadavg()[0])
    medians = {
        w: {size: {way: statistics.median(s) for way, s in ways.items()} for size, ways in sizes.items()}
        for w, sizes in sums.items()
    }
    values = {
        "rounds": rounds,
        "load_of_rounds": [round(load, 1) for load in loads],
        "parameters": num_parameters(Net())[0],
        "sums_us": {
            w: {
                size: {way: round(1e6 * seconds, 1) for way, seconds in ways.items()}
                for size, ways in sizes.items()
            }
            for w, sizes in medians.items()
        },
        "alone_ms": {w: summary(samples) for w, samples in alone.items()},
        "steps_ms": {w: summary(samples) for w, samples in together.items()},
    }
    machines = fitted(medians, record.about()["cores"], *adding())
    machines = dataclasses.replace(machines, last_s=fitted_last_s(with_text_keys(values), machines.cores))
    record.keep(
        "scaling",
        machines={k: v for k, v in dataclasses.asdict(machines).items() if v != INFINITE},
        **values,
    )
    for name, text in tables(record.newest("scaling")).items():
        print(f"\n{name}\n\n{text}")
    print(f"\nload of the machine before the first and after each round: {values['load_of_rounds']}")


def with_text_keys(values):
    """Return values as they come back from JSON, where all keys are text."""
    return json.loads(json.dumps(values))


def summary(seconds):
    """Return median, quartiles and number, in milliseconds."""
    low, median, high = (round(1e3 * q, 2) for q in statistics.quantiles(seconds, n=4))
    return {"median": median, "quartiles": [low, high], "n": len(seconds)}


def own_sums_s(kept, world_size):
    """Return the seconds of the sums of one step by themselves, as measured: interpolated between two sizes.

    Of the vector (32 bytes) the least size that was measured stands for it.
    """
    work = Work("net", kept["parameters"], 0.0)
    measured = kept["sums_us"].get(str(world_size))
    if measured is None:  # one process
        return 0.0
    sizes = sorted(map(int, measured))
    total = 0.0
    for n in (work.vector_bytes, *scaling.buckets(work.gradient_bytes)):
        below = n < scaling.gather_below_bytes(world_size)
        way = "all-reduce" if world_size == 2 else "gather" if below else "two-phase"
        total += float(np.interp(n, sizes, [measured[str(size)][way] for size in sizes])) / 1e6
    return total


def rest_s(kept, world_size):
    """Return what a measured step takes beyond measured computing and its sums by themselves."""
    step, alone = (kept[name][str(world_size)]["median"] / 1e3 for name in ("steps_ms", "alone_ms"))
    return step - alone - own_sums_s(kept, world_size)


def fitted_last_s(kept, cores):
    """Return ``Machines.last_s`` from a calibration's fitted world sizes with more processes than cores.

    Zero where there is none, or where nothing is left of a step.

    Args:
        kept: the calibration, as it comes from JSON.
        cores: that the processes share.
    """
    crowded = [w for w in FITTED if w > cores]
    per_unit = [rest_s(kept, w) / (MEETINGS * np.log2(w / cores)) for w in crowded]
    return float(f"{max(0.0, statistics.mean(per_unit)):.2g}") if per_unit else 0.0


def tables(kept):
    """Return the tables of a kept calibration: the fit, sums and steps, measured and predicted."""
    machines = Machines(between_bytes_per_s=INFINITE, **kept["machines"])
    if "last_s" not in kept["machines"]:  # a calibration from before there was such a term
        machines = dataclasses.replace(machines, last_s=fitted_last_s(kept, machines.cores))
    return {
        "fit": scaling.numbers_table([machines], places=0),
        "calibration": _sums_table(kept, machines),
        "training": _steps_table(kept, machines),
    }


def _sums_table(kept, machines):
    rows = []
    for world_size, sizes in kept["sums_us"].items():
        for size, ways in sizes.items():
            row = [world_size, f"{int(size) // 1024:,}"]
            for way, measured in ways.items():
                said = 1e6 * predicted_s(machines, way, int(size), int(world_size))
                row.append(f"{measured:,.0f} / {said:,.0f} ({said / measured:.2f})")
            rows.append(row)
    return scaling.table(["processes", "KiB", *WAYS], rows)


def _steps_table(kept, machines):
    one = kept["steps_ms"]["1"]["median"]
    work = Work("net", kept["parameters"], one / 1e3)
    rows = []
    for world_size in map(int, kept["steps_ms"]):
        step = kept["steps_ms"][str(world_size)]
        alone = kept["alone_ms"][str(world_size)]["median"]
        alone_said = one * max(1.0, world_size / machines.cores)
        sums, waits = 1e3 * own_sums_s(kept, world_size), 1e3 * rest_s(kept, world_size)
        said = 1e3 * scaling.step_s(machines, work, world_size, scaling.evenstep)
        waits_said = 1e3 * scaling.waiting_s(machines, world_size, MEETINGS) if world_size > 1 else 0.0
        parts = alone + sums + waits_said
        spread = " to ".join(f"{quartile:.1f}" for quartile in step["quartiles"])
        rows.append(
            [
                world_size,
                f"{alone:.1f} / {alone_said:.1f} ({alone_said / alone:.2f})",
                f"{sums:.1f} / {said - alone_said - waits_said:.1f}",
                f"{waits:.1f} / {waits_said:.1f}",
                f"{step['median']:.1f} ({spread}) / {said:.1f} ({said / step['median']:.2f})",
                f"{parts:.1f} ({parts / step['median']:.2f})",
            ]
        )
    head = ["processes", "computing", "sums by themselves", "waiting: the rest", "step"]
    fit = f"A doubling of the processes per core: {1e3 * machines.last_s:g} ms of waiting at each meeting."
    return scaling.table([*head, "step from measured parts"], rows) + "\n\n" + fit
