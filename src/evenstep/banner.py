"""What a run says in lines: the banner at its start, the optimizer's groups, the result at its end.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.config import TrainConfig
from evenstep.world import World, num_cores, share


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run once its data and its model are there.

    Attributes:
        data: name of the data set.
        train_samples: its size; None if unknown (an iterable data set).
        test_samples: size of the test set; None if unknown.
        steps_per_epoch: None if unknown.
        total_steps: the step at which the run ends; None if unknown.
        num_parameters: how many numbers the model learns.
        groups: the optimizer's ``param_groups``.
        lr: the learning rate that the schedule starts from.
        start_step: the steps that are committed when the run goes on, 0 for a new run.
        repeats: how many of them are reported once more: the last one, if what the loop does after it was
            cut off.
        start_epoch: the epoch that belongs to it.
        data_note: why these data and no others, if that was decided for the user.
        assumed_note: what the model was made for that the data do not say, such as the number of classes.
        precision: the precision that ``--precision auto`` stands for; None for the option's own value.
        precision_note: why it was chosen, or which other precision would be faster, if one is.
    """

    data: str
    train_samples: int | None
    test_samples: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    num_parameters: int
    groups: Sequence[Mapping[str, Any]] = ()
    lr: float | None = None
    start_step: int = 0
    repeats: int = 0
    start_epoch: int = 0
    data_note: str | None = None
    assumed_note: str | None = None
    precision: str | None = None
    precision_note: str | None = None

    @property
    def first_step(self) -> int:
        """The number of the first step that will be reported, counted from 1."""
        return self.start_step - self.repeats + 1


def banner(config: TrainConfig, world: World, facts: Facts) -> list[str]:
    """Return the lines that say what is about to happen: the arithmetic, and each choice made by itself."""
    lines = [
        f"evenstep: {config.model.model} ({facts.num_parameters:,} parameters) on {facts.data}, "
        f"{world.mode} mode, seed {world.seed}, run {world.run_dir or '(none)'}",
        _batch_line(config.optim.batch_size, world),
    ]
    if facts.train_samples is not None and facts.steps_per_epoch is not None:
        last = facts.train_samples % config.optim.batch_size
        images = f"{facts.train_samples:,} train images -> {facts.steps_per_epoch:,} steps an epoch"
        lines.append(images + (f" (the last with {last})" if last else ""))
        if facts.test_samples is not None:
            lines[-1] += f"; {facts.test_samples:,} test images"
    if facts.start_step:
        lines.append(f"going on from step {facts.start_step:,} (epoch {facts.start_epoch})")
    lines += [f"  {line}" for line in _choices(config, world)]
    if facts.data_note:
        lines.append(f"  data {facts.data}: {facts.data_note}")
    if facts.assumed_note:
        lines.append(f"  {facts.assumed_note}")
    if facts.precision_note:
        precision = facts.precision or config.model.precision
        lines.append(f"  precision {precision}: {facts.precision_note}")
    if config.optim.lr is None and facts.lr is not None:
        lines.append(f"  lr {facts.lr:g}: the default of {config.optim.optimizer} (--lr)")
    lines += [f"  optimizer {line}" for line in group_lines(facts.groups)]
    return lines


def _batch_line(batch_size: int, world: World) -> str:
    sizes = {len(share(lane, world.lanes, batch_size)) for lane in range(world.lanes)}
    owned = {len(world.lanes_of(rank)) for rank in range(world.world_size)}
    return (
        f"batch {batch_size} = {_count(world.lanes, 'lane')} x {_or(sizes)}; "
        f"{_count(world.world_size, 'process', 'es')} x {_or(owned)} {'lane' if owned == {1} else 'lanes'} x "
        f"{_count(world.threads, 'thread')} on {world.device.partition(':')[0]} ({world.backend})"
    )


def _choices(config: TrainConfig, world: World) -> list[str]:
    wanted = config.process
    lines = []
    on_gpu = world.device.startswith("cuda")
    if wanted.nproc == "auto":
        reason = "one per GPU" if on_gpu else f"no GPU, {_count(num_cores(), 'CPU core')}, at most 4"
        if wanted.lanes is not None:
            reason += f", and no more than {_count(wanted.lanes, 'lane')}"
        lines.append(f"nproc {world.local_world_size}: {reason} (--nproc)")
    if wanted.lanes is None:
        lines.append(
            f"lanes {world.lanes}: one per process; to go on later with the same bits on more processes, "
            f"start with --lanes {world.lanes * 4}"
        )
    if wanted.threads is None:
        lines.append(
            f"threads {world.threads}: {_count(num_cores(), 'core')} // "
            f"{_count(world.lanes, 'lane') if world.mode == 'exact' else 'processes'}, "
            "at least 1 (--threads)"
        )
    if wanted.device == "auto":
        lines.append(
            f"device {world.device.partition(':')[0]}: {'a' if on_gpu else 'no'} GPU found (--device)"
        )
    return lines


def group_lines(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each of an optimizer's ``param_groups``: sizes and hyperparameters."""
    lines = []
    for number, group in enumerate(groups):
        params = list(group["params"])
        values = ", ".join(
            f"{key} {value:g}"
            for key, value in group.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "initial_lr"
        )
        size = sum(p.numel() for p in params)
        lines.append(f"group {number}: {_count(len(params), 'tensor')}, {size:,} values, {values}")
    return lines


def _count(number: int, one: str, more: str = "s") -> str:
    return f"{number:,} {one}{'' if number == 1 else more}"


def _or(numbers: set[int]) -> str:
    return " or ".join(str(number) for number in sorted(numbers))


def final_line(result: Mapping[str, Any]) -> str:
    """Return the result of ``evenstep train`` or ``evenstep eval`` as one line for people."""
    parts = []
    if result.get("test_accuracy") is not None:
        parts.append(f"test accuracy {100 * result['test_accuracy']:.2f} %")
    if result.get("test_loss") is not None:
        parts.append(f"test loss {result['test_loss']:.4f}")
    if parts and result.get("test_samples"):
        samples, total = int(result["test_samples"]), result.get("test_total")
        count = f"{samples:,}" if total is None else f"{samples:,} of {total:,}"
        noun = "images" if result.get("test_accuracy") is not None else "samples"
        parts[0] += f" ({count} {noun}, each once)"
    for name, value in (result.get("test_metrics") or {}).items():
        if name != "accuracy":  # a metric of that name is the test accuracy, too
            parts.append(f"test {name} {'nan' if value is None else f'{value:.4f}'}")
    if result.get("weights_sha256"):
        parts.append(f"weights {result['weights_sha256'][:12]}")
    if result.get("step") is not None:
        parts.append(f"step {result['step']:,}")
    if result.get("run_dir"):
        parts.append(f"run {result['run_dir']}")
    return ", ".join(parts)
