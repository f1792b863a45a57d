"""Lanes: one step's gradient as the sum over logical workers, in an order that no world size changes.

A process runs its lanes one after the other. The gradients of all but the last are taken away and added up
along the tree (tree.py). The last lane's backward pass runs through torch's DistributedDataParallel, whose
communication hook adds what was taken away and hands each bucket to the ordered sum (collectives.py) while
backward goes on. What DDP takes for its module's forward pass is the whole call of the loss function
(wrapping.py): so that one gets the model itself, and may use it in any way, whatever the number of processes.

DDP is left out where there is nothing to communicate (one process), and where it asks for more than the lanes
do: with parameters that may be unused it must know of each pass which ones it uses, and it has no complex
ones. Then the gradients are taken away from every lane, and summed after backward (``sum_in_pieces``).

What every lane knows besides its gradient (loss, running statistics, a wish to stop) travels in a small
vector along the same tree. It is known after the forward pass, so its exchange hides behind backward.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenstep.agreement import check_same_model, shared_tensors
from evenstep.collectives import CommunicationThread, Exchange, reduce_nodes
from evenstep.data.batch import Batch
from evenstep.heartbeat import Activity, now
from evenstep.parameters import Parameters, take_over_from_rank_0
from evenstep.passes import (
    Forward,
    Totals,
    Watched,
    begin_step,
    explained,
    param_views,
    sum_in_pieces,
    unused_error,
)
from evenstep.seeding import seed_step
from evenstep.staging import Staging
from evenstep.tree import fold, merges_after_lane
from evenstep.world import World
from evenstep.wrapping import check_layers, wrapped

_LOSS, _COUNT, _STOP, _OTHERS, _HIDDEN = range(5)
_NUM_TOTALS = 5


class Lanes:
    """The lanes of this process for one model: forward and backward go through here, the step around it not.

    One step: ``begin``, ``run``, ``commit``. Collective: every rank must do the same.
    """

    def __init__(self, module: nn.Module, world: World, *, unused_parameters: str = "error") -> None:
        self._world = world
        self._module = module
        self._allow_unused = unused_parameters == "allow"
        self._parameters = Parameters(module)
        if world.mode == "exact":
            check_layers(module)
        self._staging = Staging(module)
        world.staged.add(self._staging)
        self._merges = merges_after_lane(world.own_lanes, world.lanes)
        self._device = torch.device(world.device)
        self._exact = world.mode == "exact"
        self._thread: CommunicationThread | None = None
        self._exchange = Exchange.of(world)
        # Direct: every collective is a single all-reduce, started by the thread that runs backward.
        self._direct = self._exchange.is_pair or not self._exact
        self._ddp: DistributedDataParallel | None = None
        self._is_open = False
        self._waited_s, self._num_steps = 0.0, 0
        if world.world_size > 1:
            check_same_model(module, world)
            take_over_from_rank_0(shared_tensors(module, world))
        self._wrap()

    def _wrap(self) -> None:
        """Put DDP around the parameters that are trained now, where it is needed and can be."""
        params = self._parameters.trained
        is_summed_after = self._allow_unused or not params or any(p.is_complex() for p in params)
        if self._world.world_size == 1 or is_summed_after:
            self._ddp = None
            return
        if not self._direct and self._thread is None:
            self._thread = CommunicationThread(self._device)
            weakref.finalize(self, self._thread.end).atexit = False
        hook = self._hook if self._exact else None
        self._ddp = wrapped(self._module, self._device, hook)

    def close(self) -> None:
        """End the communication thread."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    @property
    def _loss_scale(self) -> int:
        """What a lane's loss must be multiplied with: in fast mode, torch DDP divides by the world size."""
        return 1 if self._exact or self._ddp is None else self._world.world_size

    @property
    def wait_per_step_s(self) -> float | None:
        """Seconds of a step between the end of backward and the end of its sums; None where it is not known.

        The mean over the steps that torch DDP samples: the first ten, and each hundredth. Without DDP over
        all steps, and not known on a GPU.
        """
        if self._world.world_size == 1:
            return 0.0
        if self._ddp is None:
            return None if self._device.type == "cuda" else self._waited_s / max(1, self._num_steps)
        sampled: dict[str, Any] = getattr(self._ddp, "_get_ddp_logging_data", dict)()
        names = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time")
        if not all(name in sampled for name in names):
            return None
        return max(0.0, (int(sampled[names[0]]) - int(sampled[names[1]])) / 1e9)

    def begin(self, step: int = 0) -> None:
        """Start step number ``step``: no gradient, and the running statistics remembered."""
        self._staged, self._num_running = begin_step(
            step, self._parameters, self._staging, self._world, is_open=self._is_open
        )
        self._is_open = True
        # The loss function may freeze and unfreeze, too (a critic's, a generator's): its forward pass counts.
        self._is_settled = not self._parameters.is_unsettled
        self._step = step
        self._gradients: list[list[Tensor]] = []  # the stack of subtree sums, one tensor a parameter
        self._totals: list[list[Tensor]] = []
        self._pending: Callable[[], Tensor] | None = None
        self._turn = 0
        self._size = 0
        self._used = self._none_used()

    def run(
        self, batch: Batch, forward: Forward, *, scale: Callable[[Tensor], Tensor], watched: Watched
    ) -> Totals:
        """Run the forward and the backward pass of every own lane, and leave the sums in ``.grad``.

        Args:
            batch: this rank's part of the global batch.
            forward: runs one lane's forward pass; called on a stand-in, too, whose loss does not count.
            scale: applied to the loss before backward (torch's GradScaler).
            watched: what each lane's passes run in.
        """
        world = self._world
        for part in batch.lanes:
            if part.size == 0 and part is not batch.lanes[-1]:
                self._skip()
                continue
            seed_step(world.seed, batch.step, part.lane, self._device)
            with watched(part), self._in_turn(part.size):
                loss, count = self._run_forward(functools.partial(forward, part, self._module))
                share = part.size / batch.size
                self._after_forward(loss, count, share, stop=world.stop.is_set())
                world.at("before_reduce", self._step)
                self._backward(scale(loss * self._loss_scale))
        return self._finish()

    @contextlib.contextmanager
    def _in_turn(self, size: int) -> Iterator[None]:
        """Run the forward and the backward pass of the next own lane inside this block.

        Args:
            size: samples of the lane; 0 if its batch is a stand-in.
        """
        self._size = size
        with contextlib.ExitStack() as stack:
            for staging in self._staged:
                stack.callback(staging.rollback)
            stack.enter_context(explained(size))
            if self._ddp is not None and not self._is_last:
                stack.enter_context(self._ddp.no_sync())
            yield
        self._turn += 1

    @property
    def _is_last(self) -> bool:
        return self._turn == len(self._merges) - 1

    def _run_forward(self, run: Callable[[], tuple[Tensor, float]]) -> tuple[Tensor, float]:
        """Run a lane's forward pass, through DDP where there is one.

        Where parameters have been frozen or unfrozen, the first lane's forward pass has the last word; then
        all ranks wrap the model anew, and DDP has to know only that a backward pass comes.
        """
        if self._is_settled:
            return run() if self._ddp is None else self._ddp(run)
        result = run()
        if self._parameters.is_unsettled:
            self._settle()
        if self._ddp is not None and self._is_last:
            self._ddp(lambda: None)
        return result

    def _settle(self) -> None:
        """Train the parameters that require a gradient now. Collective: every rank must call."""
        if self._world.world_size > 1:
            check_same_model(self._module, self._world)
        self._parameters.settle()
        self._wrap()
        self._used = self._none_used()
        # What is on the stack is of lanes without samples, which did not come to a forward pass.
        self._gradients = [[torch.zeros_like(p) for p in self._parameters.trained] for _ in self._gradients]

    def _none_used(self) -> Tensor:
        return torch.zeros(len(self._parameters.trained), dtype=torch.uint8, device=self._device)

    def _skip(self) -> None:
        """Let the next own lane pass: it has no samples and is not the last."""
        self._push(self._totals, [self._lane_vector()])
        if self._exact or self._ddp is None:
            self._push(self._gradients, [torch.zeros_like(p) for p in self._parameters.trained])
        self._turn += 1

    def _after_forward(self, loss: Tensor, count: float, share: float, *, stop: bool) -> None:
        """Tell the lane's loss; on the last lane its exchange starts.

        Args:
            loss: 0-dimensional tensor: the lane's mean loss times its share, or its sum of losses.
            count: the weights' sum if the loss is a sum; else 0.
            share: the lane's part of the global batch's samples, for the running statistics.
            stop: whether this process wishes to stop after this step.
        """
        vector = self._lane_vector()
        if self._size:
            vector[_LOSS] = loss.detach()
            vector[_COUNT] = count
            self._staging.take(share, vector[_NUM_TOTALS:])
        if self._is_last:
            vector[_STOP] = float(stop)
            vector[_OTHERS] = float(self._staging.take_others())
            vector[_HIDDEN] = float(len(self._staging.newly_hidden))
        self._push(self._totals, [vector])
        if self._is_last:
            self._pending = self._exchange_totals([entry[0] for entry in self._totals])

    def _backward(self, loss: Tensor) -> None:
        """Compute the lane's gradient and take it away, unless it is the last lane's: that is DDP's."""
        if self._is_last:
            now(self._world, Activity.REDUCE)
        params = self._parameters.trained
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in params]
        if not self._allow_unused:
            missing = [name for name, g in zip(self._parameters.names, gradients, strict=True) if g is None]
            if missing or not loss.requires_grad:
                raise unused_error(missing)
        elif self._size:
            used = [g is not None for g in gradients]
            self._used |= torch.tensor(used, dtype=torch.uint8, device=self._device)
        if self._ddp is not None and (self._is_last or not self._exact):
            return  # DDP has the last lane's; in fast mode .grad adds up in torch's own way
        filled = [
            torch.zeros_like(p) if g is None or not self._size else g
            for p, g in zip(params, gradients, strict=True)
        ]
        self._push(self._gradients, filled)
        for p in params:
            p.grad = None

    def _finish(self) -> Totals:
        """Wait for the sums and leave them in ``.grad``; the model's state is still the old one."""
        assert self._pending is not None, "finish before the last lane's forward pass"
        start = time.perf_counter()
        total = self._pending()
        self._running = total[_NUM_TOTALS:]
        if self._ddp is None:
            if self._world.world_size > 1:
                self._world.at("in_reduce", self._step)
            used = self._used if self._allow_unused else None
            sum_in_pieces(self._gradients, self._parameters.trained, self._exchange, used)
        self._waited_s, self._num_steps = self._waited_s + time.perf_counter() - start, self._num_steps + 1
        if self._thread is not None and self._thread.error is not None:
            raise self._thread.error
        if self._world.world_size > 1:
            self._agree_on_other_buffers(total)
        self._is_open = False
        self._parameters.check_unwritten(self._step)
        return Totals(total[_LOSS], total[_COUNT], total[_STOP])

    def commit(self) -> None:
        """Make the running statistics of this step the model's."""
        self._staging.commit(self._running)
        for staging in self._staged:
            staging.end()

    def _agree_on_other_buffers(self, total: Tensor) -> None:
        """Take the last rank's, which has the last lane. Collective, in steps that changed any."""
        num_changed, num_hidden = total[_OTHERS:_NUM_TOTALS].tolist()
        if num_hidden:
            everybody: list[Any] = [None] * self._world.world_size
            dist.all_gather_object(everybody, self._staging.newly_hidden)
            self._staging.hide(set().union(*everybody))
        if num_changed:
            values: list[Any] = [self._staging.others]
            dist.broadcast_object_list(values, src=self._world.world_size - 1, device=torch.device("cpu"))
            self._staging.others = {
                number: None if value is None else value.to(self._device)
                for number, value in values[0].items()
            }

    def _lane_vector(self) -> Tensor:
        return torch.zeros(_NUM_TOTALS + self._num_running, dtype=torch.float64, device=self._device)

    def _push(self, stack: list[list[Tensor]], values: list[Tensor]) -> None:
        """Put one lane's values on the stack and make the sums of the tree that are due (tree.py)."""
        stack.append(values)
        for _ in range(self._merges[self._turn]):
            right = stack.pop()
            torch._foreach_add_(stack[-1], right)

    def _exchange_totals(self, nodes: list[Tensor]) -> Callable[[], Tensor]:
        if self._world.world_size == 1:
            return lambda: nodes[0]
        if not self._direct:
            exchanged = functools.partial(_reduced, nodes, self._exchange, torch.empty_like(nodes[0]))
            if self._ddp is None:
                return exchanged
            assert self._thread is not None
            return self._thread.submit(exchanged).wait
        out = nodes[0] if len(nodes) == 1 else torch.stack(nodes).sum(0)
        work = dist.all_reduce(out, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return out

        return wait

    def _hook(self, _state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce one bucket of DDP. Called by backward, bucket by bucket, in the same order on every rank.

        Args:
            _state: not used.
            bucket: a torch.distributed.GradBucket.

        Returns:
            The reduced buffer.
        """
        self._world.at("in_reduce", self._step)
        buffer, params = bucket.buffer(), bucket.parameters()
        gradients = param_views(buffer, params)
        index = [self._parameters.index[id(p)] for p in params]
        if not self._size:
            buffer.zero_()
        num_merges = self._merges[-1]
        # a + b = b + a: the earlier lanes' sums can be added to the bucket instead of it to them.
        for earlier in reversed(self._gradients[len(self._gradients) - num_merges :]):
            torch._foreach_add_(gradients, [earlier[i] for i in index])
        if self._direct:
            work = dist.all_reduce(buffer, async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: future.value()[0])
        rest = self._gradients[: len(self._gradients) - num_merges]
        nodes = [torch.empty_like(buffer) for _ in rest]
        for node, earlier in zip(nodes, rest, strict=True):
            torch._foreach_copy_(param_views(node, params), [earlier[i] for i in index])
        assert self._thread is not None
        return self._thread.submit(functools.partial(_reduced, [*nodes, buffer], self._exchange, buffer))


def _reduced(nodes: Sequence[Tensor], exchange: Exchange, out: Tensor) -> Tensor:
    reduce_nodes(nodes, exchange, out)
    return out


def naive_gradients(
    module: nn.Module, world: World, lane_losses: Sequence[Callable[[], Tensor] | None]
) -> list[Tensor]:
    """Return what ``Lanes`` leaves in ``.grad``, in the plainest way: the readable specification.

    Every lane's gradient goes to every rank, and everybody adds all of them along the tree.
    Collective: every rank must call.

    Args:
        module: the model.
        world: the world.
        lane_losses: for each own lane a function that runs the forward pass and returns the lane's mean loss
            times its share of the samples; None for an empty lane.

    Returns:
        One gradient a parameter that requires one, in the order of ``module.parameters()``.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    own = {
        (lane, lane + 1): [torch.zeros_like(p) for p in params]
        if loss is None
        else list(torch.autograd.grad(loss(), params))
        for lane, loss in zip(world.own_lanes, lane_losses, strict=True)
    }
    everybody: list[Any] = [own]
    if world.world_size > 1:
        everybody = [None] * world.world_size
        dist.all_gather_object(everybody, own)
    leaves = {node: gradient for part in everybody for node, gradient in part.items()}
    return fold(leaves, world.lanes, lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
