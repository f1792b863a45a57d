"""The parameters of a model: which are trained, what is refused, and whether a pass has written into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from evenstep.errors import ConfigError

PIECE_BYTES = 25 * 1024 * 1024
# In the first steps of a process parameters and buffers are also compared by value, which costs a pass over
# them: what is written through ``.data`` leaves no other trace.
NUM_COMPARED_STEPS = 3
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Parameters:
    """The parameters of one model.

    Attributes:
        every: all of them.
        names: the names of those that are trained: those that require a gradient.
        trained: these themselves.
        index: the number of each in ``trained``, by its identity.

    Raises:
        ConfigError: a parameter is of a kind whose gradients cannot be added up.
    """

    def __init__(self, module: nn.Module) -> None:
        self._named = list(module.named_parameters())
        self.every = [p for _, p in self._named]
        _check_kinds(module, self._named)
        self._num_steps = 0
        self._versions: list[int] = []
        self._sums: list[int] | None = None
        self.settle()

    @property
    def is_unsettled(self) -> bool:
        """Whether the loop has frozen or unfrozen some since the last ``settle``."""
        return self._required != [p.requires_grad for p in self.every]

    def settle(self) -> None:
        """Train those that require a gradient now; the others keep none, which an optimizer would apply."""
        self._required = [p.requires_grad for p in self.every]
        self.names = [name for name, p in self._named if p.requires_grad]
        self.trained = [p for p in self.every if p.requires_grad]
        self.index = {id(p): i for i, p in enumerate(self.trained)}
        for p in self.every:
            if not p.requires_grad:
                p.grad = None

    def begin(self) -> None:
        """Start a step: no gradient, and what the parameters are is remembered."""
        for p in self.every:
            p.grad = None
        self._versions = [p._version for p in self.every]
        self._sums = self._checksums() if self._num_steps < NUM_COMPARED_STEPS else None
        self._num_steps += 1

    def check_unwritten(self, step: int) -> None:
        """Raise ConfigError if a pass of this step has written into a parameter.

        That it was written to is seen in every step; that ``.data`` was, in the first ones.
        """
        changed = [p._version != version for p, version in zip(self.every, self._versions, strict=True)]
        if self._sums is not None:
            pairs = zip(self._checksums(), self._sums, strict=True)
            changed = [was or now != old for was, (now, old) in zip(changed, pairs, strict=True)]
        if not any(changed):
            return
        name = next(name for (name, _), was in zip(self._named, changed, strict=True) if was)
        raise ConfigError(
            f"the forward pass or the loss function wrote into the parameter {name!r} in step {step}. Every "
            "process would write what its own part of the batch says, and go on with other weights than the "
            "rest; and a step that fails could not be taken back. Write into parameters between the steps: "
            "an initialisation from data before TrainState is made, a momentum encoder or clipped weights in "
            "the loop after train_step. An nn.Embedding with max_norm writes, too. What a forward pass has "
            "to keep belongs into a buffer (register_buffer)."
        )

    def _checksums(self) -> list[int]:
        """Return a number for each parameter in which every bit counts; with one wait for the device."""
        if not self.every:
            return []
        sums = [bits(p).sum(dtype=torch.int64) for p in self.every]
        numbers: list[int] = torch.stack(sums).tolist()
        return numbers


def bits(values: Tensor) -> Tensor:
    """Return the same memory as whole numbers: of these nan is equal to itself, and 0.0 is not -0.0."""
    values = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
    return values.view(_WHOLE[values.element_size()])


def _check_kinds(module: nn.Module, named: Sequence[tuple[str, Tensor]]) -> None:
    for name, p in named:
        if is_lazy(p):
            raise ConfigError(
                f"the parameter {name!r} has no shape yet: it is of a lazy layer, which makes it in its "
                "first forward pass. Every process has to begin with the same weights, so run the model once "
                "on a batch of the right shape before TrainState and the optimizer are made."
            )
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            raise ConfigError(
                f"the layer {name!r} is an {type(layer).__name__} with sparse=True, whose gradients have "
                "other shapes on every process, so that they cannot be added up along the tree. Make it with "
                "sparse=False."
            )


def check_trained(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise ConfigError if an optimizer trains anything but the parameters of its model.

    Nobody would sum the gradients of the rest: each process would train them in its own way.

    Args:
        optimizer: the optimizer of a TrainState.
        module: the model of the same TrainState.
    """
    known = {id(p) for p in module.parameters()}
    others = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and id(p) not in known
    ]
    if others:
        shapes = ", ".join(str(tuple(p.shape)) for p in others[:5])
        raise ConfigError(
            f"the optimizer has {len(others)} parameters that are not the model's (of shape {shapes}), so "
            "their gradients would not be summed over the processes, and each would train its own. Put what "
            'they belong to into the model: nn.ModuleDict({"net": net, "criterion": criterion}), whose parts '
            'the loss function calls as model["net"](inputs); or leave them out of the optimizer.'
        )


def in_pieces(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Return the numbers of the tensors, piece by piece, in pieces of one dtype and of at most 25 MiB."""
    pieces: list[list[int]] = []
    last: dict[torch.dtype, int] = {}
    sizes: list[int] = []
    for i, t in enumerate(tensors):
        size = t.numel() * t.element_size()
        at = last.get(t.dtype)
        if at is None or sizes[at] + size > PIECE_BYTES:
            at = last[t.dtype] = len(pieces)
            pieces.append([])
            sizes.append(0)
        pieces[at].append(i)
        sizes[at] += size
    return iter(pieces)


def take_over_from_rank_0(tensors: Sequence[Tensor]) -> None:
    """Make rank 0's values everybody's, as DDP does. Collective: every rank must call, with the same tensors.

    They travel as bytes, because not every backend knows every dtype (gloo: no int16).
    """
    tensors = [t.detach() for t in tensors]
    for piece in in_pieces(tensors):
        parts = [tensors[i] for i in piece]
        sent = torch.cat([t.reshape(-1) for t in parts])
        dist.broadcast(sent.view(torch.uint8), src=0)
        if dist.get_rank():
            for t, values in zip(parts, torch.split(sent, [t.numel() for t in parts]), strict=True):
                t.copy_(values.view(t.shape))
