"""What ``evenstep verify`` writes down of a run, on every rank, and how two recordings are compared.

A recording holds digests, so it is small whatever the model is. It is made by an observer (world.Observer)
that ``train_step`` tells of every step, so any loop can be recorded, and is ended after the wanted steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep import world as worlds
from evenstep.world import World

Main = Callable[..., Any]


class Enough(BaseException):
    """Ends the user's loop once there is enough to compare; no ``except Exception`` may keep it."""


@dataclass(frozen=True)
class LaneRecord:
    """One lane of one step: its sample ids, a digest of its data, and how many samples it has."""

    size: int
    ids: tuple[int, ...]
    data: str


@dataclass(frozen=True)
class StepRecord:
    """One step on one rank.

    Attributes:
        step: its number, from 0.
        size: samples in the global batch.
        lanes: the lanes of this rank, by number.
        before: digests of the tensors before the step, by name.
        after: the same after the step.
        loss: the mean loss, as ``float.hex`` writes it.
        settings: what else the bits depend on: threads, deterministic algorithms, dtype and so on.
    """

    step: int
    size: int
    lanes: dict[int, LaneRecord]
    before: dict[str, str]
    after: dict[str, str]
    loss: str
    settings: dict[str, str]


@dataclass(frozen=True)
class Recording:
    """The steps of one rank, and the tensor that was asked for."""

    rank: int
    steps: tuple[StepRecord, ...]
    plain_losses: tuple[float, ...] = ()
    varies_by_lane: tuple[str, ...] = ()
    kept: Tensor | None = None


@dataclass(frozen=True)
class Keep:
    """Which tensor a recording keeps: that of a name, before or after a step."""

    step: int
    name: str
    is_before: bool


def record_job(
    world: World, main: Main, args: tuple[Any, ...], steps: int, keep: Keep | None, plain: bool
) -> Recording:
    """Run ``main(world, *args)`` for some steps and return what it did. Collective: every rank must call.

    Args:
        world: this process.
        main: the user's main, or the command's.
        args: its further arguments.
        steps: steps to record.
        keep: a tensor to keep.
        plain: whether a copy is trained with the plain PyTorch loop beside it (plain.PlainTwin).
    """
    from evenstep.verify.plain import PlainTwin

    recorder = Recorder(steps, keep, PlainTwin() if plain else None)
    watched(world, recorder, main, args)
    return recorder.recording(world.rank)


def watched(world: World, observer: worlds.Observer, main: Main, args: tuple[Any, ...]) -> None:
    """Run main with an observer, which may end it by raising Enough."""
    world = dataclasses.replace(world, observer=observer)
    with worlds.entered(world), contextlib.suppress(Enough):
        main(world, *args)


@dataclass
class Recorder:
    """The observer that records."""

    num_steps: int
    keep: Keep | None = None
    twin: Any = None
    steps: list[StepRecord] = field(default_factory=list)
    kept: Tensor | None = None
    before: dict[str, str] = field(default_factory=dict)

    def reading(self, loader: Any) -> None:
        """Nothing to record of a loader."""

    def before_step(self, state: Any, batch: Any, loss: Any) -> None:
        """Record the state as the loop hands it over."""
        self.before = digests(state)
        self._keep(state, batch.step, is_before=True)
        if self.twin is not None:
            self.twin.before_step(state, batch, loss)

    def after_step(self, state: Any, batch: Any, result: Any) -> None:
        """Record the step, and end the run after the last one."""
        lanes = {part.lane: LaneRecord(part.size, part.ids, data_digest(part.data)) for part in batch.lanes}
        self.steps.append(
            StepRecord(
                step=batch.step,
                size=batch.size,
                lanes=lanes,
                before=self.before,
                after=digests(state),
                loss=float(result.loss).hex(),
                settings=settings(state),
            )
        )
        self._keep(state, batch.step, is_before=False)
        if self.twin is not None:
            self.twin.after_step(state, batch, result)
        if len(self.steps) >= self.num_steps:
            raise Enough

    def recording(self, rank: int) -> Recording:
        """Return what was recorded so far."""
        twin = self.twin
        return Recording(
            rank,
            tuple(self.steps),
            plain_losses=() if twin is None else tuple(twin.losses),
            varies_by_lane=() if twin is None else twin.varies_by_lane,
            kept=self.kept,
        )

    def _keep(self, state: Any, step: int, *, is_before: bool) -> None:
        wanted = self.keep
        if wanted is not None and (wanted.step, wanted.is_before) == (step, is_before):
            self.kept = next((t.detach().cpu().clone() for n, t in tensors(state) if n == wanted.name), None)


def tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a TrainState with a name: parameters, buffers, optimizer state, average.

    Tensors in plain attributes of modules are no state, since no checkpoint and no rank shares them; but a
    model that keeps statistics in them depends on them, so they are compared, too.
    """
    names = {}
    for name, parameter in state.model.named_parameters():
        names[id(parameter)] = name
        yield f"parameter {name}", parameter
    for name, buffer in state.model.named_buffers():
        yield f"buffer {name}", buffer
    for name, module in state.model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"attribute {name}.{key}" if name else f"attribute {key}", value
    number = 0
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            owner = names.get(id(parameter), f"#{number}")
            number += 1
            for key, value in sorted(state.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    yield f"optimizer state {key} of {owner}", value
    if state.ema is not None:
        for name, value in state.ema.state_dict().items():
            yield f"moving average of {name}", value


def digests(state: Any) -> dict[str, str]:
    """Return the digests of all tensors of a state, by name."""
    return {name: tensor_digest(tensor) for name, tensor in tensors(state)}


def tensor_digest(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits made of dtype, shape and bytes of a tensor."""
    value = tensor.detach().cpu()
    flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.reshape(-1))
    return _digest(f"{value.dtype} {tuple(value.shape)}".encode(), flat.view(torch.uint8).numpy().tobytes())


def data_digest(data: Any) -> str:
    """Return a digest of a lane's data: of tensors, arrays, numbers and texts in tuples, lists and mappings.

    Of other objects only the type counts, because what they print may hold their address.
    """
    return _digest(*_pieces(data))


def _pieces(data: Any) -> Iterator[bytes]:
    if isinstance(data, Tensor):
        yield tensor_digest(data).encode()
    elif isinstance(data, np.ndarray) and data.dtype != object:
        yield f"{data.dtype} {data.shape}".encode() + np.ascontiguousarray(data).tobytes()
    elif isinstance(data, Mapping):
        for key in sorted(data, key=str):
            yield str(key).encode()
            yield from _pieces(data[key])
    elif isinstance(data, list | tuple | np.ndarray):
        for value in data:
            yield from _pieces(value)
    elif isinstance(data, str | bytes | int | float | complex | None | np.generic):
        yield repr(data).encode()
    else:
        yield type(data).__qualname__.encode()


def _digest(*pieces: bytes) -> str:
    sha = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        sha.update(len(piece).to_bytes(8, "little"))
        sha.update(piece)
    return sha.hexdigest()


def settings(state: Any) -> dict[str, str]:
    """Return what the bits depend on besides state and data: global settings that a loop may change."""
    found: dict[str, Any] = {
        "CPU threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cuDNN autotuning": torch.backends.cudnn.benchmark,
        "training mode": state.model.training,
        "device": state.numerics.device,
        "seed": state.world.seed,
        "learning rates": [group["lr"] for group in state.optimizer.param_groups],
    }
    return {name: str(value) for name, value in found.items()}


@dataclass(frozen=True)
class Difference:
    """The first difference between two recordings.

    Attributes:
        step: the step.
        kind: what differs first in the order of cause and effect: ``start`` (the state before the first
            step), ``between`` (the state after the loop's own lines), ``settings``, ``samples``, ``data``,
            ``loss``, ``state``, or ``length`` (one has fewer steps).
        tensors: the names of all tensors that differ, in the order of the model.
        detail: the setting or lane that differs; empty for other kinds.
        is_before: whether ``tensors`` are those before the step.
    """

    step: int
    kind: str
    tensors: tuple[str, ...] = ()
    detail: str = ""
    is_before: bool = False

    @property
    def keep(self) -> Keep | None:
        """The tensor to keep in a repetition."""
        return Keep(self.step, self.tensors[0], self.is_before) if self.tensors else None


def first_difference(a: Recording, b: Recording, *, lanes: bool = True) -> Difference | None:
    """Return the first difference between two recordings, or None.

    Args:
        a: a recording.
        b: another.
        lanes: whether both have all lanes, so that samples and data can be compared.
    """
    for number, (one, two) in enumerate(zip(a.steps, b.steps, strict=False)):
        found = _step_difference(one, two, number == 0, lanes)
        if found is not None:
            return found
    if len(a.steps) != len(b.steps):
        step = min(len(a.steps), len(b.steps))
        return Difference(step, "length", detail=f"{len(a.steps)} steps against {len(b.steps)}")
    return None


def _step_difference(one: StepRecord, two: StepRecord, is_first: bool, lanes: bool) -> Difference | None:
    before = _unequal(one.before, two.before)
    if before:
        return Difference(one.step, "start" if is_first else "between", before, is_before=True)
    after = _unequal(one.after, two.after)
    changed = _unequal(one.settings, two.settings)
    if changed:
        name = changed[0]
        detail = f"{name}: {one.settings.get(name)} against {two.settings.get(name)}"
        return Difference(one.step, "settings", after, detail)
    if (one.step, one.size) != (two.step, two.size) or (lanes and _ids(one) != _ids(two)):
        return Difference(one.step, "samples", after)
    if lanes:
        for lane in sorted(one.lanes):
            if lane in two.lanes and one.lanes[lane].data != two.lanes[lane].data:
                return Difference(one.step, "data", after, f"lane {lane}")
    if one.loss != two.loss:
        return Difference(one.step, "loss", after)
    return Difference(one.step, "state", after) if after else None


def _unequal(one: Mapping[str, str], two: Mapping[str, str]) -> tuple[str, ...]:
    names = [*one, *(name for name in two if name not in one)]
    return tuple(name for name in names if one.get(name) != two.get(name))


def _ids(record: StepRecord) -> list[tuple[int, ...]]:
    return [record.lanes[lane].ids for lane in sorted(record.lanes)]


def merged(recordings: list[Recording]) -> Recording:
    """Return rank 0's recording with the lanes of all ranks in it."""
    first = recordings[0]
    steps = []
    for number, record in enumerate(first.steps):
        lanes = {
            lane: value
            for other in recordings
            if number < len(other.steps)
            for lane, value in other.steps[number].lanes.items()
        }
        steps.append(dataclasses.replace(record, lanes=lanes))
    return dataclasses.replace(first, steps=tuple(steps))


def ulps_between(a: Tensor | None, b: Tensor | None) -> int | None:
    """Return the largest distance of two tensors in units in the last place; None if it cannot be told.

    The floating-point numbers of a type are counted in their order, -0 and 0 as one; the distance is how
    many steps apart they are. For whole numbers it is the difference.
    """
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype or a.numel() == 0:
        return None
    views = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    if not a.dtype.is_floating_point:
        pair = [x.reshape(-1).to(torch.int64).numpy() for x in (a, b)]
    elif a.element_size() not in views:
        return None
    else:
        pair = [_place(x.contiguous().reshape(-1).view(views[x.element_size()]).numpy()) for x in (a, b)]
    high, low = np.maximum(*pair), np.minimum(*pair)
    return int((high.astype(np.uint64) - low.astype(np.uint64)).max())


def _place(bits: np.ndarray) -> np.ndarray:
    """Return the place of floating-point numbers, given by their bits, in the order of all numbers."""
    wide = bits.astype(np.int64)
    lowest = np.int64(np.iinfo(bits.dtype).min)
    return np.where(wide < 0, lowest - wide, wide)
