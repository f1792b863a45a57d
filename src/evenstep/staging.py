"""Buffers of a model, kept out of its state until the step is committed.

A forward pass in training mode may change buffers: the running statistics of BatchNorm, the vectors of
spectral normalisation, whatever a layer of the user's keeps. Every lane starts from the same buffers, those
before the step, and the model holds these until ``commit``. What the buffers are after it:

* Normalisation layers: each lane normalises with its own batch, as each replica of DDP does, and the new
  running mean and variance are those of the lanes averaged with the lanes' shares of the samples, added in
  tree order. With one lane these are the bits of plain PyTorch.
* Any other buffer that changed: that of the last lane, since nobody but its layer knows how to average it. So
  it is with the statistics of a layer that was in evaluation mode when the step began, but changed them.

A change is seen by the buffer's version, which torch counts. What is written through ``buffer.data`` is not
counted, and seen by value only, which is looked at in the first steps; a buffer in which that has been seen
is from then on taken for changed in every lane. One that the loop writes so between two steps is from then on
remembered anew in every step.

A step of one model may run another model of the same training, too (a GAN's discriminator). The other one's
buffers are put back after each lane and not committed: a step changes the state of its own model alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from evenstep.globalnorm import GlobalBatchNorm
from evenstep.parameters import NUM_COMPARED_STEPS, bits

_AVERAGED = ("running_mean", "running_var", "num_batches_tracked")


class Staging:
    """The buffers of one model during one step."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [m for m in model.modules() if _is_averaged(m) and m.running_mean is not None]
        self._buffers = [(module, name) for module in model.modules() for name in module._buffers]
        # Which buffers are not averaged: all but the statistics of the layers that are in training mode.
        self._others: list[int] = []
        self._in_training: list[bool] | None = None
        self._hidden: set[int] = set()
        self._by_loop: set[int] = set()  # those that the loop writes in this way; remembered in every step
        self._num_told = 0
        self._num_steps = 0
        self._floats: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._old_floats: list[Tensor] = []
        self._old_counts: list[Tensor] = []
        self._versions: list[int] = []
        # What each other buffer was before the step: itself, a copy, and its version at the copy.
        self._old_others: list[tuple[Tensor | None, Tensor | None, int]] = [(None, None, -1)] * len(
            self._buffers
        )
        self._new_others: dict[int, Tensor | None] = {}
        self._in_step = False

    def begin(self) -> int:
        """Remember the buffers before the step; return how many numbers a lane will give."""
        self._in_step = False
        self._num_steps += 1
        in_training = [module.training for module in self._norms]
        if in_training != self._in_training:
            self._in_training = in_training
            self._others = [
                number
                for number, (module, name) in enumerate(self._buffers)
                if not (name in _AVERAGED and _is_averaged(module) and _is_active(module))
            ]
        active = [module for module in self._norms if module.training]
        self._floats = [b for m in active for b in (m.running_mean, m.running_var) if b is not None]
        self._counts = [m.num_batches_tracked for m in active if m.num_batches_tracked is not None]
        self._old_floats = [buffer.clone() for buffer in self._floats]
        self._old_counts = [count.clone() for count in self._counts]
        self._versions = [buffer._version for buffer in (*self._floats, *self._counts)]
        self._new_others = {}
        for number, now in self._now():
            # A mask or a table never changes, and is copied once and not in every step.
            is_marked = self._is_marked(number, now) or number in self._by_loop
            if not is_marked and self._is_other_value(number, now):
                # By the loop, since the last step: no forward pass has changed it.
                self._by_loop.add(number)
                is_marked = True
            if is_marked:
                self._old_others[number] = _remembered(now)
        self._in_step = True
        return sum(buffer.numel() for buffer in self._floats) + len(self._counts)

    def take(self, share: float, out: Tensor) -> None:
        """Write the statistics after a lane's forward pass, times ``share``.

        ``rollback`` has to follow, but only after the backward pass: autograd has saved the buffers for it,
        and would notice that they changed.

        Args:
            share: the lane's part of the global batch's samples, 0 to 1.
            out: float64 tensor with as many elements as ``begin`` returned.
        """
        if not self._floats:
            return
        counts = torch._foreach_sub(self._counts, self._old_counts) if self._counts else ()
        parts = [*(buffer.detach().reshape(-1) for buffer in self._floats), *(c.view(1) for c in counts)]
        torch.cat([part.double() for part in parts], out=out)
        out.mul_(share)

    def take_others(self) -> int:
        """Keep the other buffers that the last lane's forward pass changed, and return how many they are."""
        self._new_others = {
            number: None if now is None else now.detach().clone()
            for number, now in self._now()
            if self._is_changed(number, now)
        }
        return len(self._new_others)

    @property
    def newly_hidden(self) -> set[int]:
        """The buffers in which this rank has seen changes that have no version, if others may not know."""
        return self._hidden if len(self._hidden) > self._num_told else set()

    def hide(self, numbers: set[int]) -> None:
        """Take these buffers for changed in every lane; every rank has to have the same ones."""
        self._hidden = set(numbers)
        self._num_told = len(self._hidden)

    def rollback(self) -> None:
        """Put the buffers back to what they were before the step."""
        with torch.no_grad():
            for now, old in ((self._floats, self._old_floats), (self._counts, self._old_counts)):
                if now:
                    torch._foreach_copy_(now, old)
            for number, present in self._now():
                if not self._is_changed(number, present):
                    continue
                module, name = self._buffers[number]
                buffer, copy, version = self._old_others[number]
                is_written = buffer is not None and (buffer._version != version or number in self._hidden)
                if is_written and buffer is not None and copy is not None:
                    buffer.copy_(copy)
                module._buffers[name] = buffer
                self._old_others[number] = (buffer, copy, -1 if buffer is None else buffer._version)

    @property
    def others(self) -> dict[int, Tensor | None]:
        """The other buffers that ``commit`` will put in, by number; set them to what all ranks agreed on."""
        return self._new_others

    @others.setter
    def others(self, values: dict[int, Tensor | None]) -> None:
        self._new_others = values

    def first_changed(self) -> str | None:
        """Return a text that names a buffer that a forward pass has changed since ``begin``, if there is one.

        For lanes that cannot be told apart by their order, and so must not change any.
        """
        for number, now in self._now():
            if self._is_changed(number, now):
                module, name = self._buffers[number]
                return f"the buffer {name!r} of a {type(module).__name__}"
        changed = [
            buffer._version != version
            for buffer, version in zip([*self._floats, *self._counts], self._versions, strict=True)
        ]
        return "the running statistics of a layer" if any(changed) else None

    def commit(self, total: Tensor) -> None:
        """Make the sum of what the lanes gave the model's statistics, and put the other buffers in."""
        sizes = [buffer.numel() for buffer in self._floats]
        with torch.no_grad():
            parts = torch.split(total, [*sizes, len(self._counts)])
            for buffer, part in zip(self._floats, parts, strict=False):
                buffer.copy_(part.view_as(buffer))
            for count, passes in zip(self._counts, parts[-1].tolist(), strict=True):
                # A mean over lanes; a layer that only some of them used has been used, too.
                count.add_(math.ceil(passes - 1e-6))
            for number, value in self._new_others.items():
                module, name = self._buffers[number]
                old = module._buffers[name]
                if old is None or value is None or old.shape != value.shape or old.dtype != value.dtype:
                    module._buffers[name] = value
                else:
                    old.copy_(value)
        self.end()

    def end(self) -> None:
        """End the step: from now on the model's own buffers are the state."""
        self._in_step = False

    def before_step(self) -> dict[tuple[int, str], Tensor | None]:
        """Return the buffers as they were before the step in hand, by the layer's identity and their name.

        Any thread may call, while the main thread is in a step: its lane may have changed the buffers.
        """
        if not self._in_step:
            return {}
        averaged = {
            id(now): old
            for now, old in (
                *zip(self._floats, self._old_floats, strict=True),
                *zip(self._counts, self._old_counts, strict=True),
            )
        }
        before: dict[tuple[int, str], Tensor | None] = {}
        others = set(self._others)
        for number, (module, name) in enumerate(self._buffers):
            now = module._buffers.get(name)
            if id(now) in averaged:
                before[id(module), name] = averaged[id(now)]
            elif number in others:
                before[id(module), name] = self._old_others[number][1]
        return before

    def _now(self) -> Iterator[tuple[int, Tensor | None]]:
        for number in self._others:
            module, name = self._buffers[number]
            yield number, module._buffers.get(name)

    def _is_changed(self, number: int, now: Tensor | None) -> bool:
        if self._is_marked(number, now):
            return True
        if self._is_other_value(number, now):
            self._hidden.add(number)
            return True
        return False

    def _is_marked(self, number: int, now: Tensor | None) -> bool:
        """Whether a buffer is another than the one remembered, or is taken for changed in every lane."""
        buffer, _, version = self._old_others[number]
        return now is not buffer or (now is not None and now._version != version) or number in self._hidden

    def _is_other_value(self, number: int, now: Tensor | None) -> bool:
        """Whether a bit is another than in the copy, which is looked at in the first steps only."""
        _, copy, _ = self._old_others[number]
        if now is None or copy is None or self._num_steps > NUM_COMPARED_STEPS:
            return False
        return now.dtype != copy.dtype or not torch.equal(bits(now), bits(copy))


def _is_active(module: _NormBase) -> bool:
    """Whether a layer's statistics are averaged: those of a layer in evaluation mode are not to change."""
    return module.training or module.running_mean is None


def _is_averaged(module: nn.Module) -> TypeGuard[_NormBase]:
    """Whether a layer's statistics are those of each lane; over the global batch there are no others."""
    return isinstance(module, _NormBase) and not isinstance(module, GlobalBatchNorm)


def _remembered(buffer: Tensor | None) -> tuple[Tensor | None, Tensor | None, int]:
    return (None, None, -1) if buffer is None else (buffer, buffer.detach().clone(), buffer._version)
