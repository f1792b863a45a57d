"""From the command line to the options of a run, with the source of every value.

Precedence: flag > ``--config`` file > the run directory's own config.toml (with ``--resume``) > the
``--recipe`` > default. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep import world as worlds
from evenstep.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    OutputConfig,
    ProcessConfig,
    RunConfig,
    TrainConfig,
)
from evenstep.errors import CheckpointError, ConfigError
from evenstep.flags import keys_of, read_flags, scan_flags, wants_help
from evenstep.flat import check_values, field_groups, from_flat, read_toml, to_flat
from evenstep.needs import without_effect
from evenstep.recipes import recipe_values
from evenstep.rundir import RUNS, checkpoints, newest_run, newest_whole

if TYPE_CHECKING:
    from evenstep.doctor.examine import DoctorOptions

# What --resume does not take from the run directory: these keys describe the moment (this machine, this
# call), not the run. data_dir is not among them: it says which data the run was trained on.
MOMENT = frozenset(
    {
        *("run_dir", "resume", "smoke_test", "steps"),
        *("nnodes", "rdzv_endpoint", "rdzv_id"),
        *("nproc", "device", "gpus", "gpu_memory_fraction", "lanes_on_oom", "backend", "timeout_s"),
        *("max_restarts", "nproc_min", "stop_grace_s", "hang_after", "on_hang"),
        *("cache_dir", "workers", "json", "quiet"),
    }
)

# What --smoke-test sets wherever nothing else was asked for.
SMOKE: Mapping[str, Any] = {"steps": 4, "epochs": 1, "log_every": 1}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one call of a command.

    Attributes:
        config: the values.
        sources: where each value comes from: ``flag``, ``file run.toml``, ``run directory``, ``recipe fast``,
            ``smoke test``, ``newest run`` or ``default``, for every key.
        notes: what was decided on the way and has to be said to the user.
    """

    config: TrainConfig
    sources: dict[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """Train and evaluate a model with data parallelism; the same bits on any number of processes."""

    # TrainConfig's groups without its checks across groups: a flag may put right what a file alone has wrong.
    config: str | None = None
    """A TOML file with any of the options below (batch_size = 256). Flags win over it."""
    run: RunConfig = field(default_factory=RunConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    output: OutputConfig = field(default_factory=OutputConfig)


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Evaluate a checkpoint. Model, data and precision are those of the run that wrote it."""

    run_dir: str | None = None
    """Run directory: its newest checkpoint that is whole is evaluated."""
    checkpoint: str | None = None
    """One checkpoint of a run (runs/NAME/checkpoints/step-00000390)."""
    data: str | None = None
    """Other data than the run's, written as for evenstep train."""
    data_dir: str | None = None
    """Where cifar10 is looked for and downloaded to. Default: as in the run."""
    cache_dir: str | None = None
    """Where decoded images are kept. Default: $XDG_CACHE_HOME/evenstep or ~/.cache/evenstep."""
    metrics: str | None = None
    """Metrics of your own, module:callable. Default: as in the run."""
    nproc: int | typing.Literal["auto"] = "auto"
    """Processes on this machine. The numbers are the same for any."""
    device: typing.Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU, else cpu."""
    gpus: str | None = None
    """GPUs to use: numbers (0,1), or idle or idle:N for GPUs that nobody uses."""
    gpu_memory_fraction: float | None = None
    """Share of each GPU's memory that this run may take, 0 to 1."""
    backend: str | None = None
    """Backend of torch.distributed. Default: nccl on cuda, gloo on cpu."""
    workers: int = 0
    """DataLoader worker processes per process, for your own Datasets."""
    timeout_s: float = 300.0
    """Seconds that a process waits for the others in one collective."""
    json: bool = False
    """Print one JSON object with the results as the last line of stdout."""
    quiet: bool = False
    """Print only the result and errors."""


def parse(argv: Sequence[str], command: str = "train") -> Options:
    """Return the options that a command line means. Reads files, writes none.

    Args:
        argv: the words after the command word.
        command: the command word, for the messages.

    Raises:
        ConfigError: a flag, a key or a value is wrong.
        CheckpointError: there is nothing to resume.
        SystemExit: the help was printed (0), or a value does not fit its flag (2).
    """
    prog = f"evenstep {command}"
    if wants_help(argv):
        return _to_options(read_flags(TrainFlags, argv, prog, TrainFlags()), {}, ())
    given = scan_flags(argv, keys_of(TrainFlags), prog)
    flags = TrainFlags()
    sources: dict[str, str] = {}
    notes: list[str] = []

    path = given.pop("config", None)
    file = check_values(read_toml(path), path) if isinstance(path, str) else {}
    recipe = given.get("recipe", file.get("recipe"))
    resumes = bool(given.get("resume", file.get("resume", False)))
    if isinstance(recipe, str):
        values = recipe_values(recipe)
        # A run's own config.toml says everything: what it leaves out is None, and not for the recipe to set.
        if resumes or _is_whole(file):
            values = {}
        flags, sources = _put(flags, values, f"recipe {recipe}"), dict.fromkeys(values, f"recipe {recipe}")
    if resumes:
        run_dir = given.get("run_dir", file.get("run_dir"))
        if run_dir is None:
            run_dir = str(newest_run(RUNS))
            notes.append(f"resuming {run_dir}: the newest run in {RUNS}/ that has a checkpoint")
            flags, sources["run_dir"] = _put(flags, {"run_dir": run_dir}, run_dir), "newest run"
        saved = resumable_values(Path(str(run_dir)))
        if recipe is not None and recipe != saved.get("recipe"):
            raise ConfigError(
                f"--recipe {recipe} does not go with --resume: the run in {run_dir} has its options already, "
                f"those of {'no recipe' if saved.get('recipe') is None else saved['recipe']}. Leave out "
                "--recipe, or begin a new run in another --run-dir."
            )
        flags = _put(flags, saved, f"{run_dir}/config.toml")
        sources |= dict.fromkeys(saved, "run directory")
    flags = _put(flags, file, str(path))
    sources |= dict.fromkeys(file, f"file {path}")

    flags = read_flags(TrainFlags, argv, prog, flags)
    sources |= dict.fromkeys(given, "flag")
    options = _with_effect(_to_options(flags, sources, tuple(notes)))
    return make_smoke(options) if options.config.run.smoke_test else options


def _with_effect(options: Options) -> Options:
    """Return the options without those that do nothing beside the others; see :mod:`evenstep.needs`.

    Raises:
        ConfigError: one was given that does nothing.
    """
    left_out, notes = without_effect(to_flat(options.config), options.sources, place=worlds.placement())
    return Options(
        config=from_flat(left_out, options.config),
        sources=options.sources | dict.fromkeys(left_out, "default"),
        notes=(*options.notes, *notes),
    )


def _is_whole(values: Mapping[str, Any]) -> bool:
    """Return whether a file has every option that is not None by default, as a run's config.toml has."""
    return all(key in values for key, value in to_flat(TrainConfig()).items() if value is not None)


def check_flags(argv: Sequence[str]) -> None:
    """Raise ConfigError if a flag of ``evenstep train`` is unknown or lacks its value. Takes no time."""
    scan_flags(argv, keys_of(TrainFlags), "evenstep train")


def parse_eval(argv: Sequence[str]) -> EvalOptions:
    """Return the options of ``evenstep eval``; errors as :func:`parse`."""
    prog = "evenstep eval"
    if not wants_help(argv):
        scan_flags(argv, keys_of(EvalOptions), prog)
    options = read_flags(EvalOptions, argv, prog, EvalOptions())
    if (options.run_dir is None) == (options.checkpoint is None):
        raise ConfigError(
            f"{prog} needs one of --run-dir and --checkpoint, and got "
            f"{'none' if options.run_dir is None else 'both'}: it must know which weights to evaluate. "
            "Use --run-dir DIR for the newest checkpoint of a run, or --checkpoint DIR for a certain one."
        )
    return options


def parse_doctor(argv: Sequence[str]) -> DoctorOptions:
    """Return the options of ``evenstep doctor``; errors as :func:`parse`."""
    from evenstep.doctor.examine import DoctorOptions

    if not wants_help(argv):
        scan_flags(argv, keys_of(DoctorOptions), "evenstep doctor")
    return read_flags(DoctorOptions, argv, "evenstep doctor", DoctorOptions())


def eval_config(options: EvalOptions) -> tuple[TrainConfig, Path]:
    """Return the config to evaluate with, and the checkpoint's directory.

    Raises:
        CheckpointError: the run has no checkpoint, or its config.toml is missing.
    """
    if options.checkpoint is not None:
        checkpoint = Path(options.checkpoint).resolve()
        run_dir = checkpoint.parent.parent
        if not (checkpoint / "manifest.json").is_file():
            raise CheckpointError(
                f"{options.checkpoint} is not a checkpoint: it has no manifest.json. Give a directory "
                "such as --checkpoint runs/NAME/checkpoints/step-00000390, or the run with --run-dir."
            )
    else:
        run_dir = Path(str(options.run_dir))
        found = checkpoints(run_dir)
        if not found:
            raise CheckpointError(
                f"run directory {run_dir} has no checkpoint to evaluate. Check --run-dir, or train it first: "
                f"evenstep train --run-dir {run_dir}."
            )
        # If none is whole, the reading of the newest says what is wrong with it.
        checkpoint = newest_whole(run_dir) or found[-1]
    path = run_dir / "config.toml"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, and with it the model and the data that {checkpoint.name} was trained with. "
            "Put it back, or evaluate in your own code with evenstep.evaluate."
        )
    values = resumable_values(run_dir)
    for key in (k.name for k in dataclasses.fields(EvalOptions) if k.name in field_groups()):
        value = getattr(options, key)
        if key in MOMENT or value is not None:
            values[key] = value
    # Lanes belong to training; here they would only limit the number of processes. The threads stay.
    if values.get("threads") is None and (lanes := values.get("lanes")):
        values["threads"] = worlds.default_threads(lanes)
    values |= {"lanes": None, "run_dir": None}
    config = from_flat(values, where=str(path))
    left_out, _ = without_effect(to_flat(config), _eval_sources(options, values), place=worlds.placement())
    return from_flat(left_out, config), checkpoint


def _eval_sources(options: EvalOptions, values: Mapping[str, Any]) -> dict[str, str]:
    """Return where each of the values comes from that evaluate a checkpoint."""
    given = {f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default}
    return {
        key: "flag" if key in given else "default" if key in MOMENT else "run directory" for key in values
    }


def launch_options(config: TrainConfig, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return what ``evenstep.launch`` is to be given, by keyword, for a config.

    Args:
        config: the options.
        leave_out: keywords that the caller decides itself.
    """
    process, run, output = config.process, config.run, config.output
    found = {
        "nproc": process.nproc,
        "nnodes": process.nnodes,
        "rdzv_endpoint": process.rdzv_endpoint,
        "rdzv_id": process.rdzv_id,
        "lanes": process.lanes,
        "device": process.device,
        "gpus": process.gpus,
        "gpu_memory_fraction": process.gpu_memory_fraction,
        "backend": process.backend,
        "threads": process.threads,
        "seed": run.seed,
        "mode": run.mode,
        "started": worlds.process_started(),  # from the return key on, not from here
        "run_dir": run.run_dir,
        "resume": run.resume,
        "timeout_s": process.timeout_s,
        "max_restarts": process.max_restarts,
        "nproc_min": process.nproc_min,
        "stop_grace_s": process.stop_grace_s,
        "hang_after": process.hang_after,
        "on_hang": process.on_hang,
        "log_level": output.log_level,
        "log_rotation": output.log_rotation,
        "log_diagnose": output.log_diagnose,
    }
    return {key: value for key, value in found.items() if key not in leave_out}


def make_smoke(options: Options) -> Options:
    """Return options for a few steps of everything in seconds; what was asked for by name stays."""
    wanted = dict(SMOKE)
    if options.config.data.data == "auto" and options.sources["data_dir"] == "default":
        wanted["data"] = "digits"
    changed = {key: value for key, value in wanted.items() if options.sources[key] == "default"}
    told = ", ".join(f"{key} {value}" for key, value in changed.items())
    return Options(
        config=from_flat(changed, options.config, where="smoke test"),
        sources=options.sources | dict.fromkeys(changed, "smoke test"),
        notes=(*options.notes, f"smoke test: {told}") if changed else options.notes,
    )


def resumable_values(run_dir: Path) -> dict[str, Any]:
    """Return what a resumed run takes from its own config.toml: everything that describes the run.

    Raises:
        CheckpointError: there is no checkpoint to go on from.
        ConfigError: config.toml is damaged.
    """
    if not checkpoints(run_dir):
        raise CheckpointError(
            f"--resume: run directory {run_dir} has no checkpoint to go on from. Check --run-dir, or leave "
            "out --resume to start a new run there."
        )
    path = run_dir / "config.toml"
    if not path.is_file():  # a run of the library, which has its options in the user's code
        return {}
    values = check_values(read_toml(path), str(path))
    return {key: value for key, value in values.items() if key not in MOMENT}


def _to_options(flags: TrainFlags, sources: Mapping[str, str], notes: tuple[str, ...]) -> Options:
    config = TrainConfig(**{f.name: getattr(flags, f.name) for f in dataclasses.fields(TrainConfig)})
    return Options(
        config=config, sources={key: sources.get(key, "default") for key in field_groups()}, notes=notes
    )


def _put(flags: TrainFlags, values: Mapping[str, Any], where: str) -> TrainFlags:
    groups = field_groups()
    changed: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        changed.setdefault(groups[key], {})[key] = value
    try:
        return dataclasses.replace(
            flags,
            **{name: dataclasses.replace(getattr(flags, name), **new) for name, new in changed.items()},
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
