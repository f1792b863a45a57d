"""Lanes: one step's gradient as the sum over logical workers, in an order that no world size changes.

A process runs its lanes one after the other. The gradients of all but the last are taken away and added up
along the tree (tree.py). The last lane's backward pass runs through torch's DistributedDataParallel, whose
communication hook adds what was taken away and hands each bucket to the ordered sum (collectives.py) while
backward goes on. With a world of one process there is nothing to communicate, and DDP is left out.

What every lane knows besides its gradient (loss, running statistics, a wish to stop) travels in a small
vector along the same tree. It is known after the forward pass, so its exchange hides behind backward.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenstep.agreement import check_same_model
from evenstep.collectives import CommunicationThread, Exchange, reduce_nodes
from evenstep.data.batch import Batch
from evenstep.errors import ConfigError
from evenstep.heartbeat import Activity, now
from evenstep.passes import Forward, Totals, Watched, begin_step, explained, param_views, unused_error
from evenstep.seeding import seed_step
from evenstep.staging import Staging
from evenstep.tree import fold, merges_after_lane
from evenstep.world import World

_LOSS, _COUNT, _STOP, _OTHERS = range(4)
_NUM_TOTALS = 4


class Lanes:
    """The lanes of this process for one model: forward and backward go through here, the step around it not.

    One step: ``begin``, ``run``, ``commit``. Collective: every rank must do the same.
    """

    def __init__(self, module: nn.Module, world: World, *, unused_parameters: str = "error") -> None:
        self._world = world
        self._allow_unused = unused_parameters == "allow"
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._params = [p for _, p in named]
        self._index = {id(p): i for i, p in enumerate(self._params)}
        if world.mode == "exact":
            _check_layers(module)
        self._staging = Staging(module)
        world.staged.add(self._staging)
        self._merges = merges_after_lane(world.own_lanes, world.lanes)
        self._device = torch.device(world.device)
        self._exact = world.mode == "exact"
        self._thread: CommunicationThread | None = None
        self._exchange = Exchange.of(world)
        self._module = self._ddp = module
        self._is_open = False
        if world.world_size > 1:
            check_same_model(module, world)
            # Direct: every collective is a single all-reduce, started by the thread that runs backward.
            self._direct = self._exchange.is_pair or not self._exact
            if not self._direct:
                # DDP sends its own bitmap of used parameters, in a place of its own among our collectives.
                if self._allow_unused:
                    group = dist.new_group()
                    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
                    self._exchange = Exchange.of(world, group)
                self._thread = CommunicationThread(self._device)
                weakref.finalize(self, self._thread.end).atexit = False
            ddp = _wrap(module, self._device, find_unused=self._allow_unused)
            if self._exact:
                ddp.register_comm_hook(None, _weakly(self._hook))
            self._ddp = ddp

    def close(self) -> None:
        """End the communication thread."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    @property
    def _loss_scale(self) -> int:
        """What a lane's loss must be multiplied with: in fast mode, torch DDP divides by the world size."""
        return 1 if self._exact else self._world.world_size

    @property
    def wait_per_step_s(self) -> float | None:
        """Seconds of a step between the end of backward and the end of its sums; None where it is not known.

        The mean over the steps that torch DDP samples: the first ten, and each hundredth.
        """
        if self._world.world_size == 1:
            return 0.0
        sampled: dict[str, Any] = getattr(self._ddp, "_get_ddp_logging_data", dict)()
        names = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time")
        if not all(name in sampled for name in names):
            return None
        return max(0.0, (int(sampled[names[0]]) - int(sampled[names[1]])) / 1e9)

    def begin(self, step: int = 0) -> None:
        """Start step number ``step``: no gradient, and the running statistics remembered."""
        self._staged, self._num_running = begin_step(
            step, self._params, self._staging, self._world, is_open=self._is_open
        )
        self._is_open = True
        self._step = step
        self._gradients: list[list[Tensor]] = []  # the stack of subtree sums, one tensor a parameter
        self._totals: list[list[Tensor]] = []
        self._pending: Callable[[], Tensor] | None = None
        self._turn = 0
        self._size = 0
        self._reduced: dict[int, Tensor] = {}
        self._used = torch.zeros(len(self._params), dtype=torch.uint8, device=self._device)

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
            with watched(part), self._in_turn(part.size) as model:
                loss, count = forward(part, model)
                share = part.size / batch.size
                self._after_forward(loss, count, share, stop=world.stop.is_set())
                world.at("before_reduce", self._step)
                self._backward(scale(loss * self._loss_scale))
        return self._finish()

    @contextlib.contextmanager
    def _in_turn(self, size: int) -> Iterator[nn.Module]:
        """Run the forward and the backward pass of the next own lane inside this block.

        Args:
            size: samples of the lane; 0 if its batch is a stand-in.

        Yields:
            What the loss function has to call: the model itself, or DDP around it.
        """
        self._size = size
        with contextlib.ExitStack() as stack:
            for staging in self._staged:
                stack.callback(staging.rollback)
            stack.enter_context(explained(size))
            if self._past_ddp:
                yield self._module
            else:
                if isinstance(self._ddp, DistributedDataParallel) and not self._is_last:
                    stack.enter_context(self._ddp.no_sync())
                yield self._ddp
        self._turn += 1

    @property
    def _is_last(self) -> bool:
        return self._turn == len(self._merges) - 1

    @property
    def _past_ddp(self) -> bool:
        """Whether this lane goes past DDP.

        DDP notes which parameters every backward pass used, and in the last one misses the gradients that
        were taken away in between. It only looks where parameters may be unused.
        """
        return self._allow_unused and self._exact and self._world.world_size > 1 and not self._is_last

    def _skip(self) -> None:
        """Let the next own lane pass: it has no samples and is not the last."""
        self._push(self._totals, [self._lane_vector()])
        if self._exact or self._world.world_size == 1:
            self._push(self._gradients, [torch.zeros_like(p) for p in self._params])
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
        self._push(self._totals, [vector])
        if self._is_last:
            self._pending = self._exchange_totals([entry[0] for entry in self._totals])

    def _backward(self, loss: Tensor) -> None:
        """Compute the lane's gradient and take it away, unless it is the last lane's: that is DDP's."""
        if self._is_last:
            now(self._world, Activity.REDUCE)
        gradients: Sequence[Tensor | None]
        if self._past_ddp:
            gradients = torch.autograd.grad(loss, self._params, allow_unused=True)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [p.grad for p in self._params]
        missing = [i for i, g in enumerate(gradients) if g is None]
        if missing and not self._allow_unused:
            raise unused_error([self._names[i] for i in missing])
        if self._size and self._allow_unused:
            used = [g is not None for g in gradients]
            self._used |= torch.tensor(used, dtype=torch.uint8, device=self._device)
        if self._world.world_size > 1 and (self._is_last or not self._exact):
            return  # DDP has the last lane's; in fast mode .grad adds up in torch's own way
        filled = [
            torch.zeros_like(p) if g is None or not self._size else g
            for p, g in zip(self._params, gradients, strict=True)
        ]
        self._push(self._gradients, filled)
        for p in self._params:
            p.grad = None

    def _finish(self) -> Totals:
        """Wait for the sums and leave them in ``.grad``; the model's state is still the old one."""
        assert self._pending is not None, "finish before the last lane's forward pass"
        total = self._pending()
        self._running = total[_NUM_TOTALS:]
        if self._world.world_size == 1:
            for i, (p, gradient) in enumerate(zip(self._params, self._gradients[0], strict=True)):
                p.grad = gradient if not self._allow_unused or self._used[i] else None
        elif self._allow_unused and self._exact:
            dist.all_reduce(self._used, op=dist.ReduceOp.MAX)
            for i, p in enumerate(self._params):
                if not self._used[i]:
                    p.grad = None
                elif p.grad is None:  # used by an earlier lane only, which DDP has not seen
                    p.grad = self._reduced[i].clone()
        if self._thread is not None and self._thread.error is not None:
            raise self._thread.error
        if self._world.world_size > 1 and float(total[_OTHERS]):
            self._agree_on_other_buffers()
        self._is_open = False
        return Totals(total[_LOSS], total[_COUNT], total[_STOP])

    def commit(self) -> None:
        """Make the running statistics of this step the model's."""
        self._staging.commit(self._running)
        for staging in self._staged:
            staging.end()

    def _agree_on_other_buffers(self) -> None:
        """Take the last rank's, which has the last lane. Collective, in steps that changed any."""
        values: list[Any] = [self._staging.others]
        dist.broadcast_object_list(values, src=self._world.world_size - 1, device=torch.device("cpu"))
        self._staging.others = {
            number: None if value is None else value.to(self._device) for number, value in values[0].items()
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
        if self._thread is not None:
            out = torch.empty_like(nodes[0])
            return self._thread.submit(lambda: _reduced(nodes, self._exchange, out)).wait
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
        index = [self._index[id(p)] for p in params]
        if not self._size:
            buffer.zero_()
        num_merges = self._merges[-1]
        # a + b = b + a: the earlier lanes' sums can be added to the bucket instead of it to them.
        for earlier in reversed(self._gradients[len(self._gradients) - num_merges :]):
            torch._foreach_add_(gradients, [earlier[i] for i in index])
        if self._allow_unused:
            self._reduced.update(zip(index, gradients, strict=True))
        if self._direct:
            work = dist.all_reduce(buffer, async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: future.value()[0])
        rest = self._gradients[: len(self._gradients) - num_merges]
        nodes = [torch.empty_like(buffer) for _ in rest]
        for node, earlier in zip(nodes, rest, strict=True):
            torch._foreach_copy_(param_views(node, params), [earlier[i] for i in index])
        assert self._thread is not None
        return self._thread.submit(lambda: _reduced([*nodes, buffer], self._exchange, buffer))


def _weakly(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook for DDP that does not keep the method's object alive.

    DDP keeps a hook in C++, where Python cannot see that both hold each other, and would never free them.
    """
    method = weakref.WeakMethod(hook)

    # DDP checks the annotations of a hook, and cannot read them where they are strings: so there are none.
    def called(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        alive = method()
        assert alive is not None, "a backward pass of lanes that have been dropped"
        return alive(state, bucket)

    return called


def _reduced(nodes: Sequence[Tensor], exchange: Exchange, out: Tensor) -> Tensor:
    reduce_nodes(nodes, exchange, out)
    return out


def _check_layers(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                f"the layer {name!r} is a torch.nn.SyncBatchNorm, which adds up its statistics in an order "
                "that depends on the number of processes, and would wait for ever where one of them has more "
                "lanes than another. Pass --batchnorm global: then it has its statistics over the global "
                "batch with the same bits everywhere. Or use torch.nn.BatchNorm1d, 2d or 3d, where each lane "
                "normalises with its own samples. For torch's layer, which needs GPUs, pass --mode fast."
            )


def _wrap(module: nn.Module, device: torch.device, *, find_unused: bool) -> DistributedDataParallel:
    # torch 2.14 renamed broadcast_buffers. Ours are staged, so DDP must not touch them.
    name = "forward_sync_buffers"
    if name not in inspect.signature(DistributedDataParallel.__init__).parameters:
        name = "broadcast_buffers"
    options: dict[str, Any] = {name: False}
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,
        **options,
    )


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
