"""Lanes whose BatchNorm layers have their statistics over the global batch (``--batchnorm global``).

All lanes of a process are in the same step at once, each in a thread of its own of which only one runs
(handover.py). They meet at every BatchNorm layer, in forward and again in backward, and at the end of both.
At a meeting each lane brings a vector of a fixed length with the place's number in front, so that lanes that
have come to different places are found on every rank at once, and nobody waits.

There is no DDP here: gradients are taken from autograd lane by lane, added along the tree, and exchanged in
pieces after backward. What lanes bring is added along the same tree, so all bits are those of any other
world size.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep.agreement import check_same_model, shared_tensors
from evenstep.collectives import Exchange, reduce_nodes
from evenstep.data.batch import Batch, LaneBatch
from evenstep.errors import ConfigError
from evenstep.globalnorm import BACKWARD_ENDS, FORWARD_ENDS, GlobalBatchNorm, convert, places_of
from evenstep.handover import HandOver
from evenstep.heartbeat import Activity, now
from evenstep.parameters import Parameters, take_over_from_rank_0
from evenstep.passes import Forward, Totals, Watched, begin_step, sum_in_pieces, unused_error
from evenstep.seeding import seed_step
from evenstep.staging import Staging
from evenstep.tree import merges_after_lane
from evenstep.world import World

_HEADER = 3  # how many lanes have come, the sum of their places' numbers, and of the squares of these


class GlobalLanes:
    """The lanes of this process for one model, as ``evenstep.lanes.Lanes``, with BatchNorm over all of them.

    The model's BatchNorm layers are converted in place (globalnorm.convert).
    Collective: every rank must do the same.

    Raises:
        ConfigError: a layer cannot be converted, or a process would have several lanes on a GPU.
    """

    def __init__(self, module: nn.Module, world: World, *, unused_parameters: str = "error") -> None:
        if torch.device(world.device).type == "cuda" and world.lanes > world.world_size:
            raise ConfigError(
                f"--batchnorm global with {world.lanes} lanes on {world.world_size} processes: on GPUs each "
                "process can have one lane only, because torch runs the backward pass of all lanes in one "
                f"thread there, where they cannot wait for each other. Start {world.lanes} processes "
                f"(--nproc {world.lanes}), use --lanes {world.world_size}, or pass --batchnorm lane."
            )
        self._world = world
        self._allow_unused = unused_parameters == "allow"
        self._module = module
        self._device = torch.device(world.device)
        self._parameters = Parameters(module)
        self._places = places_of(world)
        convert(module, self._places)
        self._layers = {id(layer) for layer in module.modules() if isinstance(layer, GlobalBatchNorm)}
        self._staging = Staging(module)
        world.staged.add(self._staging)
        self._merges = merges_after_lane(world.own_lanes, world.lanes)
        self._exchange = Exchange.of(world)
        self._waited_s, self._num_steps = 0.0, 0
        self._is_open = False
        if world.world_size > 1:
            check_same_model(module, world)
            take_over_from_rank_0(shared_tensors(module, world))

    def close(self) -> None:
        """Do nothing: no thread outlives a step."""

    @property
    def wait_per_step_s(self) -> float | None:
        """Seconds of a step between the end of backward and the end of its sums, the mean over all steps.

        None where it is not known: on a GPU.
        """
        if self._world.world_size == 1 or not self._num_steps:
            return 0.0
        return None if self._device.type == "cuda" else self._waited_s / self._num_steps

    def begin(self, step: int = 0) -> None:
        """Start step number ``step``: no gradient, and the buffers remembered."""
        self._staged, _ = begin_step(
            step, self._parameters, self._staging, self._world, is_open=self._is_open
        )
        self._is_open = True
        self._step = step
        self._gradients: list[list[Tensor]] = []  # the stack of subtree sums, one tensor a parameter
        self._records: list[tuple[GlobalBatchNorm, Tensor, Tensor]] = []
        self._totals: Tensor | None = None
        self._used: Tensor | None = None

    def run(
        self, batch: Batch, forward: Forward, *, scale: Callable[[Tensor], Tensor], watched: Watched
    ) -> Totals:
        """Run the forward and the backward pass of every own lane, and leave the sums in ``.grad``.

        Arguments as for ``Lanes.run``.

        Raises:
            ConfigError: on every rank, if lanes have come to different layers.
        """
        tasks = [
            functools.partial(self._run_lane, number, batch, forward, scale, watched)
            for number in range(len(batch.lanes))
        ]
        self._is_stand_in = [part.size == 0 for part in batch.lanes]
        self._lanes = HandOver(tasks, self._sum)
        self._places.meeting = self
        try:
            self._lanes.run()
        finally:
            self._places.meeting = None
            for staging in self._staged:
                staging.rollback()
        start = time.perf_counter()
        self._world.at("in_reduce", self._step)
        used = self._used if self._allow_unused else None
        sum_in_pieces(self._gradients, self._parameters.trained, self._exchange, used)
        self._gradients = []
        self._waited_s, self._num_steps = self._waited_s + time.perf_counter() - start, self._num_steps + 1
        self._is_open = False
        self._parameters.check_unwritten(self._step)
        assert self._totals is not None
        loss, count, stop = self._totals[:3]
        return Totals(loss, count, stop)

    def commit(self) -> None:
        """Let the running statistics take in those of this step."""
        with torch.no_grad():
            for layer, mean, var in self._records:
                layer.update(mean, var)
        for staging in self._staged:
            staging.end()

    @property
    def is_empty(self) -> bool:
        """Whether the lane that runs has no samples, so that its batch is a stand-in."""
        return self._is_stand_in[self._lanes.current]

    def meet(self, place: int, values: Tensor | None) -> Tensor:
        """Return the sum of what all lanes bring to ``place``, at least as long as ``values`` (float64).

        Called from within a lane's forward or backward pass. Collective: every lane must come.
        """
        total: Tensor = self._lanes.arrive((place, values))
        return total

    def record(self, layer: GlobalBatchNorm, mean: Tensor, var: Tensor) -> None:
        """Remember a layer's statistics for the commit, once for all lanes of this process.

        Not those of a forward pass that activation checkpointing repeats, nor of another model's layer.
        """
        if self._lanes.current == 0 and self._totals is None and id(layer) in self._layers:
            self._records.append((layer, mean, var))

    def _run_lane(
        self, number: int, batch: Batch, forward: Forward, scale: Callable[[Tensor], Tensor], watched: Watched
    ) -> None:
        part = batch.lanes[number]
        seed_step(self._world.seed, batch.step, part.lane, self._device)
        with watched(part):
            loss, count = forward(part, self._module)
            self._check_buffers()
            wishes_to_stop = part is batch.lanes[-1] and self._world.stop.is_set()
            values = torch.zeros(3, dtype=torch.float64, device=self._device)
            if part.size:
                values[0], values[1] = loss.detach(), count
            values[2] = float(wishes_to_stop)
            totals = self.meet(FORWARD_ENDS, values)
            self._totals = totals
            now(self._world, Activity.REDUCE)
            self._world.at("before_reduce", self._step)
            self._settle()
            params = self._parameters.trained
            gradients: Sequence[Tensor | None] = [None] * len(params)
            if loss.requires_grad and params:
                gradients = torch.autograd.grad(scale(loss), params, allow_unused=True)
            self.meet(BACKWARD_ENDS, None)
            self._add(gradients, part)  # only now, when lanes surely come in their order

    def _check_buffers(self) -> None:
        for staging in self._staged:
            changed = staging.first_changed()
            if changed is not None:
                raise ConfigError(
                    f"the forward pass changes {changed}. With --batchnorm global all lanes of a process are "
                    "in the forward pass at once and would find each other's changes. Use a layer without "
                    "such a buffer (InstanceNorm with track_running_stats=False), give all models in the "
                    'step batchnorm="global", or pass --batchnorm lane.'
                )

    def _settle(self) -> None:
        """Train the parameters that require a gradient after the forward passes. Collective, once a step."""
        if self._parameters.is_unsettled:
            if self._world.world_size > 1:
                check_same_model(self._module, self._world)
            self._parameters.settle()

    def _add(self, gradients: Sequence[Tensor | None], part: LaneBatch) -> None:
        """Put a lane's gradient on the stack and make the sums of the tree that are due."""
        params = self._parameters.trained
        missing = [name for name, g in zip(self._parameters.names, gradients, strict=True) if g is None]
        if not self._allow_unused and (missing or not gradients):
            raise unused_error(missing)
        used = [g is not None and part.size > 0 for g in gradients]
        own = torch.tensor(used, dtype=torch.uint8, device=self._device)
        self._used = own if self._used is None else self._used | own
        self._gradients.append(_of_their_own(gradients if part.size else [None] * len(gradients), params))
        for _ in range(self._merges[part.lane - self._world.own_lanes.start]):
            right = self._gradients.pop()
            torch._foreach_add_(self._gradients[-1], right)

    def _sum(self, brought: list[tuple[int, Tensor | None]]) -> Tensor:
        """Return the sum of what all lanes of all processes have brought. Collective."""
        width = max(self._places.width, 3)
        stack: list[Tensor] = []
        for (place, values), num_merges in zip(brought, self._merges, strict=True):
            row = torch.zeros(_HEADER + width, dtype=torch.float64)
            row[0], row[1], row[2] = 1, place, place * place
            row = row.to(self._device)
            if values is not None:
                row[_HEADER : _HEADER + len(values)] = values
            stack.append(row)
            for _ in range(num_merges):
                right = stack.pop()
                stack[-1].add_(right)
        total = stack[0]
        if self._world.world_size > 1:
            total = torch.empty_like(stack[0])
            reduce_nodes(stack, self._exchange, total)
        num_lanes, places, squares = (int(n) for n in total[:_HEADER].tolist())
        # The mean of squares is the square of the mean only where all are equal; whole numbers are exact.
        if num_lanes * squares != places * places:
            self._raise_apart([place for place, _ in brought])
        return total[_HEADER:]

    def _raise_apart(self, own: list[int]) -> None:
        self._is_open = False  # no rank waits for another
        everybody: list[Any] = [own]
        if self._world.world_size > 1:
            everybody = [None] * self._world.world_size
            dist.all_gather_object(everybody, own)
        places = [place for part in everybody for place in part]
        other = next(lane for lane, place in enumerate(places) if place != places[0])
        raise ConfigError(
            f"in step {self._step}, lane 0 has come to {self._places.describe(places[0])}, but lane {other} "
            f"to {self._places.describe(places[other])}. With --batchnorm global every lane has to use the "
            "same BatchNorm layers in the same order, because they share their statistics. Let the model's "
            "path not depend on the data, or pass --batchnorm lane."
        )


def _of_their_own(gradients: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients, zeros for None, so that each can be written to without changing another.

    autograd.grad gives parameters that are added the same tensor, or parts of one, and for ``p.sum()`` one
    number in all places. ``backward`` copies these before it leaves them in ``.grad``.
    """
    own: list[Tensor] = []
    taken: set[int] = set()
    for p, gradient in zip(params, gradients, strict=True):
        if gradient is None:
            own.append(torch.zeros_like(p))
            continue
        memory = gradient.untyped_storage().data_ptr()
        is_shared = memory in taken or 0 in gradient.stride()
        own.append(torch.empty_like(p).copy_(gradient) if is_shared else gradient)
        taken.add(memory)
    return own
