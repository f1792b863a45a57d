"""Which options do something only beside another one; one that is given and would do nothing is an error.

What counts is who said what. A recipe, a file or a run's own config.toml says many things at once, and a
flag may switch off what some of them belong to (``--recipe fast --no-augment``): those are left out. But an
option that was given where, or after, the other one was settled is a mistake. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.config import CROSS_ENTROPY, TrainConfig
from evenstep.errors import ConfigError
from evenstep.flat import to_flat
from evenstep.world import Placement

_STRENGTH = ("default", "recipe", "run directory", "file", "flag")
"""First words of the sources of values, the weakest first."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Options that do nothing unless another one has certain values.

    Attributes:
        options: their keys.
        on: the key of the other one.
        met: returns whether the options do something, given the values of all keys; besides these
            ``sources``, where they come from, ``launcher``, the outer launcher or None, and ``started``, the
            processes that it has started on this machine.
        why: why they do nothing, as part of a sentence.
        instead: what else to do than to leave them out, as the beginning of a sentence.
        idle: values that ask for nothing, and so are never wrong.
        beside: the circumstance in words, where it is not the value of ``on``.
    """

    options: tuple[str, ...]
    on: str
    met: Callable[[Mapping[str, Any]], bool]
    why: str
    instead: str
    idle: tuple[Any, ...] = ()
    beside: str | None = None


def _is_own(data: str) -> bool:
    """Return whether ``--data`` names a callable."""
    return ":" in data and not Path(data).expanduser().exists()


def _nnodes_said(values: Mapping[str, Any]) -> bool:
    """Return whether the number of machines was said where, or after, it was said where they meet.

    Files with all options say ``nnodes = 1`` whoever has set it or not: beside a flag that does not count.
    """
    nnodes, endpoint = (values["sources"].get(key, "default") for key in ("nnodes", "rdzv_endpoint"))
    return values["nnodes"] != 1 or (nnodes != "default" and _strength(nnodes) >= _strength(endpoint))


_LAUNCHER = "Give the launcher's own option"

NEEDS = (
    Need(
        options=("crop_padding", "crop_border", "flip"),
        on="augment",
        met=lambda v: v["augment"],
        why="it says how training images are augmented, and they are not",
        instead="Add --augment",
        idle=(0, "zeros", "none"),
    ),
    Need(
        options=("crop_border",),
        on="crop_padding",
        met=lambda v: v["crop_padding"] > 0,
        why="no image is shifted, so nothing is seen beyond its edge",
        instead="Give more --crop-padding",
        idle=("zeros",),
    ),
    Need(
        options=("data_dir",),
        on="data",
        met=lambda v: v["data"] in ("auto", "cifar10"),
        why="that is where cifar10 is looked for",
        instead="Use --data cifar10",
    ),
    Need(
        options=("workers",),
        on="data",
        met=lambda v: _is_own(v["data"]),
        why="images that evenstep decodes are read from memory, without a DataLoader",
        instead="Use --data module:callable, a Dataset of your own",
        idle=(0,),
    ),
    Need(
        options=("batchnorm",),
        on="model",
        met=lambda v: v["model"] != "net",
        why="it has no BatchNorm",
        instead="Use another --model",
        idle=("lane",),
    ),
    Need(
        options=("lr_rest",),
        on="optimizer",
        met=lambda v: v["optimizer"] == "muon",
        why="it has one learning rate for all parameters, --lr",
        instead="Use --optimizer muon",
    ),
    Need(
        options=("momentum",),
        on="optimizer",
        met=lambda v: v["optimizer"] in ("sgd", "muon"),
        why="it has moments of its own",
        instead="Use --optimizer sgd or muon",
    ),
    Need(
        options=("nesterov",),
        on="optimizer",
        met=lambda v: v["optimizer"] in ("sgd", "muon"),
        why="Nesterov momentum is a form of sgd's",
        instead="Use --optimizer sgd",
        idle=(False,),
    ),
    Need(
        options=("nesterov",),
        on="optimizer",
        met=lambda v: v["optimizer"] != "muon",
        why="muon always has Nesterov momentum",
        instead="Use --optimizer sgd",
        idle=(True,),
    ),
    Need(
        options=("nesterov",),
        on="momentum",
        met=lambda v: v["momentum"] > 0,
        why="Nesterov momentum is a form of momentum",
        instead="Use --momentum 0.9",
        idle=(False,),
    ),
    Need(
        options=("lr_decay", "lr_decay_epochs"),
        on="lr_schedule",
        met=lambda v: v["lr_schedule"] == "step",
        why="it belongs to the schedule step",
        instead="Use --lr-schedule step",
    ),
    Need(
        options=("warmup_epochs",),
        on="lr_schedule",
        met=lambda v: v["lr_schedule"] != "onecycle",
        why="onecycle warms up by itself over the first 30% of the steps",
        instead="Use --lr-schedule cosine",
        idle=(0,),
    ),
    Need(
        options=("label_smoothing",),
        on="loss",
        met=lambda v: v["loss"] == CROSS_ENTROPY,
        why="a loss of your own does not know of it",
        instead=f"Use --loss {CROSS_ENTROPY}",
        idle=(0,),
    ),
    Need(
        options=("gpus",),
        on="device",
        met=lambda v: v["device"] != "cpu",
        why="no GPU is used",
        instead="Use --device cuda",
    ),
    Need(
        options=("rdzv_endpoint",),
        on="nnodes",
        met=_nnodes_said,
        why="machines meet there, and this one expects no other",
        instead="Give the number of machines with --nnodes",
    ),
    Need(
        options=("rdzv_id",),
        on="rdzv_endpoint",
        met=lambda v: v["rdzv_endpoint"] is not None,
        why="machines meet under that name, and this one meets nobody",
        instead="Give --rdzv-endpoint HOST:PORT and --nnodes",
    ),
    Need(
        options=("on_hang",),
        on="hang_after",
        met=lambda v: v["hang_after"] > 0,
        why="without a report nothing comes after it",
        instead="Use --hang-after 60",
        idle=("wait",),
    ),
    Need(
        options=("nproc",),
        on="launcher",
        met=lambda v: v["launcher"] is None or v["nproc"] == v["started"],
        why="it has started the processes, {started} on this machine",
        instead=_LAUNCHER,
        idle=("auto",),
        beside="under {launcher}",
    ),
    Need(
        options=("nnodes", "rdzv_endpoint", "rdzv_id"),
        on="launcher",
        met=lambda v: v["launcher"] is None,
        why="it has brought the machines together",
        instead=_LAUNCHER,
        idle=(1,),
        beside="under {launcher}",
    ),
    Need(
        options=("max_restarts", "nproc_min", "stop_grace_s"),
        on="launcher",
        met=lambda v: v["launcher"] is None,
        why="it is who restarts and ends the processes",
        instead=_LAUNCHER,
        beside="under {launcher}",
    ),
)


def without_effect(
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    *,
    place: Placement | None = None,
    needs: Sequence[Need] = NEEDS,
) -> tuple[dict[str, Any], list[str]]:
    """Find the options that would do nothing, and refuse those that are a mistake.

    Args:
        values: the value of every key.
        sources: where each value comes from, as in ``Options.sources``; ``default`` where a key is missing.
        place: the place that an outer launcher has given this process.
        needs: which option needs what.

    Returns:
        The options that are to be left out, ``{key: default}``, and what to say of it. They are those that
        a recipe, a file or a run directory has set, and that lost their meaning through something stronger;
        what a run directory has set is never refused.

    Raises:
        ConfigError: an option was given that does nothing; in a file, with another value than its default.
    """
    origin = {"launcher": "flag", **sources}
    known = {
        **values,
        "sources": sources,
        "launcher": place and place.launcher,
        "started": place and place.local_world_size,
    }
    defaults = to_flat(TrainConfig())
    left_out: dict[str, Any] = {}
    lost: dict[str, list[str]] = {}
    for need, key in _unmet(needs, known):
        source, value = origin.get(key, "default"), values[key]
        if source == "default" or value in need.idle:
            continue
        if source.startswith("file") and value == defaults[key]:
            continue  # files with all options have the defaults as well, whoever has set them or not
        beside = _beside(need, known, origin)
        if source != "run directory" and _strength(source) >= _strength(origin.get(need.on, "default")):
            given = _given(key, value) if source == "flag" else f"{key} {value} ({source})"
            raise ConfigError(
                f"{given} does nothing {beside}: {need.why.format(**known)}. {need.instead}, or leave out "
                f"{given.split()[0]}."
            )
        if value != defaults[key]:
            left_out[key] = defaults[key]
            lost.setdefault(f"of the {source}, for {{}} nothing {beside}", []).append(f"{key} {value}")
    notes = [
        f"left out {', '.join(found)} {where.format('it does' if len(found) == 1 else 'they do')}"
        for where, found in lost.items()
    ]
    return left_out, notes


def _unmet(needs: Sequence[Need], known: Mapping[str, Any]) -> list[tuple[Need, str]]:
    unmet = [need for need in needs if not need.met(known)]
    return [(need, key) for need in unmet for key in need.options]


def _strength(source: str) -> int:
    return next((i for i, word in enumerate(_STRENGTH) if source.startswith(word)), 0)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _given(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return _flag(key if value else f"no_{key}")
    return f"{_flag(key)} {value}"


def _beside(need: Need, known: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    if need.beside is not None:
        return need.beside.format(**known)
    value, source = known[need.on], sources.get(need.on, "default")
    if value is None or value is False:
        return f"without {_flag(need.on)}" + (f" ({source})" if source not in ("default", "flag") else "")
    said = {"flag": "", "default": ", the default"}.get(source, f" ({source})")
    return f"with {_flag(need.on)} {value}{said}"
