"""Experiments that find out why two runs differ. They run in the worker, right before the step that differs.

Each probe changes one thing and looks whether the bits change: the same sample read twice, the same lane run
twice, with the clock stopped, with the system's entropy replaced, and the same lane on every rank. What a
probe finds is a Finding; diagnosis.py makes a cause of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep.seeding import preserved_rng, seed_sample, seed_step
from evenstep.step import to_device
from evenstep.verify.frozen import fixed_entropy, home_of, stopped_clock
from evenstep.verify.recording import Enough, Main, data_digest, tensor_digest, watched
from evenstep.world import World

REPEATS = 6
"""Runs of each experiment: a race that goes well now and then must not be taken for repeatable."""
SAMPLES = 4
_DEPTH = 4

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """What a probe found.

    Attributes:
        kind: generator, hidden_state, buffer, clock, entropy, repeat, backward, rank, order, worker, reread.
        where: the module, generator, buffer, attribute or sample, as a name for people.
        is_data: whether it was found in the data, and not in the model.
    """

    kind: str
    where: str
    is_data: bool = False


@dataclass(frozen=True)
class Pass:
    """The bits of one forward and backward pass of a lane."""

    outputs: tuple[tuple[str, str], ...]
    loss: str
    gradients: tuple[tuple[str, str], ...]


@dataclass
class Prober:
    """The observer that waits for a step, runs the probes before it, and ends the run."""

    step: int
    world: World
    findings: list[Finding] = field(default_factory=list)
    first: Pass | None = None
    loader: Any = None

    def reading(self, loader: Any) -> None:
        """Remember the Loader, whose dataset is probed."""
        self.loader = loader

    def before_step(self, state: Any, batch: Any, loss: Any) -> None:
        """Run the probes if it is time."""
        if batch.step < self.step:
            return
        with preserved_rng():
            if self.loader is not None:
                self.findings += probe_data(self.loader, batch, self.world)
            found, self.first = probe_model(state, batch, loss)
            self.findings += found
        raise Enough

    def after_step(self, state: Any, batch: Any, result: Any) -> None:
        """Nothing to do after a step."""


def probe_job(
    world: World, main: Main, args: tuple[Any, ...], step: int
) -> tuple[list[Finding], Pass | None]:
    """Run ``main(world, *args)`` up to a step and probe there. Collective: every rank must call.

    Returns:
        The findings, and the bits of the first pass; None if the run ended before the step.
    """
    prober = Prober(step, world)
    watched(world, prober, main, args)
    return prober.findings, prober.first


def probe_model(state: Any, batch: Any, loss: Any) -> tuple[list[Finding], Pass]:
    """Probe model and loss function on the first lane of rank 0's batch. Collective: every rank must call."""
    part = next((part for part in batch.lanes if part.size), batch.lanes[0])
    lane, data = _of_first_rank(state.world, (part.lane, part.data))
    data = to_device(data, state.device)
    model: nn.Module = state.model

    def run() -> Pass:
        seed_step(state.world.seed, batch.step, lane, state.device)
        return run_lane(state, loss, data)

    held = held_generators(model)
    before = {name: _generator_state(generator) for name, generator in held.items()}
    buffers = {name: tensor_digest(buffer) for name, buffer in model.named_buffers()}
    hidden = hidden_values(model)
    saved = [(name, t.detach().clone()) for name, t in _model_tensors(model)]

    def restored(make: Callable[[], T]) -> list[T]:
        values = []
        for _ in range(REPEATS):
            _restore(model, saved)
            values.append(make())
        return values

    first = run()
    remarks = _seeded_by_rank(state.world, held)
    found = [
        Finding("generator", name + remarks.get(name, ""))
        for name, generator in held.items()
        if _generator_state(generator) != before[name]
    ]
    found += [
        Finding("hidden_state", name)
        for name, value in hidden_values(model).items()
        if hidden.get(name, value) != value
    ]
    if not found:
        found = _compare_passes([first, *restored(run)], run, restored, home_of(type(model), loss))
        found += [
            Finding("buffer", name)
            for name, buffer in model.named_buffers()
            if buffers.get(name, "") not in ("", tensor_digest(buffer))
        ]
    _restore(model, saved)
    return found + _compare_ranks(state.world, first), first


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _restore(model: nn.Module, saved: list[tuple[str, Tensor]]) -> None:
    now = dict(_model_tensors(model))
    with torch.no_grad():
        for name, tensor in saved:
            now[name].copy_(tensor)


def _seeded_by_rank(world: World, held: Mapping[str, Any]) -> dict[str, str]:
    """Return a remark for each generator that was seeded otherwise on another rank. Collective."""
    seeds = {name: g.initial_seed() for name, g in held.items() if isinstance(g, torch.Generator)}
    everybody: list[Any] = [seeds]
    if world.world_size > 1:
        everybody = [None] * world.world_size
        dist.all_gather_object(everybody, seeds)
    rows = {name: [other.get(name) for other in everybody] for name in seeds}
    return {
        name: f", seeded by rank ({', '.join(map(str, row))})"
        for name, row in rows.items()
        if len(set(row)) > 1
    }


def _compare_passes(
    passes: list[Pass],
    run: Callable[[], Pass],
    restored: Callable[[Callable[[], Any]], list[Any]],
    homes: list[Any],
) -> list[Finding]:
    forward = first_unequal([p.outputs for p in passes])
    if forward is None and len({p.loss for p in passes}) > 1:
        forward = "the loss function"
    backward = None
    if forward is None:
        backward = first_unequal([tuple(reversed(p.gradients)) for p in passes])
    if forward is None and backward is None:
        return []
    kind = _outside(run, homes, restored)
    if kind is not None:
        return [Finding(kind, forward or str(backward))]
    return [Finding("repeat", forward)] if forward else [Finding("backward", str(backward))]


def _compare_ranks(world: World, first: Pass) -> list[Finding]:
    """Look whether the same lane with the same state gives the same bits on all ranks."""
    if world.world_size == 1:
        return []
    everybody: list[Any] = [None] * world.world_size
    dist.all_gather_object(everybody, first)
    name = first_unequal([one.outputs for one in everybody])
    if name is None and len({one.loss for one in everybody}) > 1:
        name = "the loss function"
    if name is None:
        name = first_unequal([tuple(reversed(one.gradients)) for one in everybody])
        name = name and f"the gradient of {name}"
    return [Finding("rank", name)] if name else []


def first_unequal(rows: list[tuple[tuple[str, str], ...]]) -> str | None:
    """Return the first name whose digests are not the same in all rows."""
    for column in itertools.zip_longest(*rows):
        if len(set(column)) > 1:
            return str(next(cell[0] for cell in column if cell is not None))
    return None


def run_lane(state: Any, loss: Any, data: Any) -> Pass:
    """Run forward and backward on one lane's data, past DDP, and return the bits. ``.grad`` is left alone."""
    outputs: list[tuple[str, str]] = []

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, output: outputs.append((name, data_digest(output)))

    handles = [
        module.register_forward_hook(note(f"{name or 'the model'} ({type(module).__name__})"))
        for name, module in state.model.named_modules()
    ]
    try:
        with state.autocast():
            value = loss(state.model, data)
        total = value[0] if isinstance(value, tuple) else value
        named = [(name, p) for name, p in state.model.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    bits = [(name, data_digest(g)) for (name, _), g in zip(named, gradients, strict=True)]
    return Pass(tuple(outputs), data_digest(total.detach()), tuple(bits))


def probe_data(loader: Any, batch: Any, world: World) -> list[Finding]:
    """Probe the dataset of a Loader on samples of rank 0's batch. Collective: every rank must call."""
    dataset = loader.dataset
    ids = _of_first_rank(world, next((part.ids for part in batch.lanes if part.size), ()))[:SAMPLES]
    if not hasattr(dataset, "__getitem__") or not ids:
        return []

    def read() -> tuple[str, ...]:
        found = []
        for index in ids:
            seed_sample(loader.seed, batch.epoch, index)
            found.append(data_digest(dataset[index]))
        return tuple(found)

    held = held_generators(dataset)
    before = {name: _generator_state(generator) for name, generator in held.items()}
    before_hidden = hidden_values(dataset)
    first = read()
    found = [Finding("generator", n, True) for n, g in held.items() if _generator_state(g) != before[n]]
    hidden = hidden_values(dataset)
    repeats = [first, *(read() for _ in range(REPEATS))]
    if not found and len(set(repeats)) > 1:
        changed = [name for name, value in hidden.items() if before_hidden.get(name, value) != value]
        sample = ids[next(i for i, column in enumerate(zip(*repeats, strict=True)) if len(set(column)) > 1)]
        why = _outside(read, home_of(type(dataset)), lambda make: [make() for _ in range(REPEATS)])
        found = [Finding(why or "reread", f"sample {sample}", True)]
        if found[0].kind == "reread" and changed:
            found = [Finding("hidden_state", changed[0], True)]
    if world.world_size > 1:
        everybody: list[Any] = [None] * world.world_size
        dist.all_gather_object(everybody, first)
        for index, column in zip(ids, zip(*everybody, strict=True), strict=True):
            if len(set(column)) > 1:
                return [*found, Finding("rank", f"sample {index}", True)]
    if not found and loader.reading.workers:
        found = [Finding("worker", f"{loader.reading.workers} DataLoader workers", True)]
    return found


def _outside(
    make: Callable[[], Hashable],
    homes: list[Any],
    repeated: Callable[[Callable[[], Any]], list[Any]],
) -> str | None:
    """Return ``clock`` or ``entropy`` if that is why ``make`` does not repeat itself.

    With it held still all values must be the same, and without, taking turns, most must be different: the
    clock and entropy give something new each time, whereas a race may happen to have one order for a while.
    """
    for kind, frozen in (("clock", stopped_clock), ("entropy", fixed_entropy)):

        def pair(frozen: Callable[[list[Any]], Any] = frozen) -> tuple[Any, Any]:
            with frozen(homes):
                held = make()
            return held, make()

        held, free = zip(*repeated(pair), strict=True)
        if len(set(held)) == 1 and len(set(free)) > REPEATS // 2:
            return kind
    return None


def _of_first_rank(world: World, value: T) -> T:
    shared: list[Any] = [value]
    if world.world_size > 1:
        dist.broadcast_object_list(shared, src=0)
    first: T = shared[0]
    return first


def _attributes(thing: Any, path: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds in its attributes, and what the objects in there hold, with names."""
    if isinstance(thing, nn.Module):
        for name, module in thing.named_modules():
            for key, value in vars(module).items():
                if key not in _MODULE_INTERNALS:
                    yield from _inside(value, f"{name}.{key}" if name else key, depth)
        return
    for key, value in getattr(thing, "__dict__", {}).items():
        yield from _inside(value, f"{path}{key}", depth)


def _inside(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    yield path, value
    if depth == 0 or isinstance(value, nn.Module | Tensor | np.ndarray | type):
        return
    if isinstance(value, list | tuple) and len(value) <= 64:
        for i, item in enumerate(value):
            yield from _inside(item, f"{path}[{i}]", depth - 1)
    elif type(value).__module__.partition(".")[0] not in _LIBRARIES:
        yield from _attributes(value, f"{path}.", depth - 1)


_LIBRARIES = frozenset({"builtins", "torch", "numpy", "random", "threading", "collections", "functools"})
_MODULE_INTERNALS = frozenset(vars(nn.Module()))


def held_generators(thing: Any) -> dict[str, Any]:
    """Return the random generators that an object holds in its attributes, by name."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return {
        name: value
        for name, value in _attributes(thing)
        if isinstance(value, kinds) and not isinstance(value, random.SystemRandom)
    }


def hidden_values(thing: Any) -> dict[str, str]:
    """Return digests of numbers, texts and tensors in plain attributes, which are in no state_dict."""
    plain = int | float | str | bytes | Tensor | np.ndarray
    found: dict[str, str] = {}
    for name, value in _attributes(thing):
        if isinstance(value, plain):
            found[name] = data_digest(value)
        elif isinstance(value, dict | list | set):
            small = len(value) <= 1000 and all(isinstance(item, plain) for item in value)
            found[name] = (
                data_digest(list(value)) if small and not isinstance(value, set) else str(len(value))
            )
    return found


def _generator_state(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return tensor_digest(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return data_digest(generator.get_state(legacy=True))
    return data_digest(generator.getstate())
