"""The options of a run as frozen dataclasses, with what each of their values must be.

Every option has one name: the field here, the flag (``--batch-size``), the key in the TOML file
(``batch_size``) and, where it is reported, the key in the JSON. The groups below exist for reading and for
``--help``; names are unique over all groups, so files and flags are flat (flat.py). Where a value comes from
is settled in options.py, and which options need which in needs.py. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from evenstep.errors import ConfigError, did_you_mean
from evenstep.recipes import recipe_values

MODELS = ("net", "resnet9", "whitenet")
SOURCES = ("auto", "cifar10", "digits")
CROSS_ENTROPY = "cross_entropy"


LONGEST_S = 365 * 24 * 3600.0
"""No time to wait is longer: clocks of 64 bits of nanoseconds overflow, and an infinite one is no time."""


def _positive(name: str, value: float | None) -> None:
    if value is None:
        return
    _finite(name, value)
    if value <= 0:
        raise ConfigError(
            f"{name} is {value}; it must be above 0. Use --{name.replace('_', '-')} with a larger value."
        )


def _finite(name: str, value: float) -> None:
    # nan compares as neither too small nor too large.
    if not math.isfinite(value):
        raise ConfigError(
            f"{name} is {value}; it must be a finite number. Use --{name.replace('_', '-')} with a number, "
            "or leave it out for the default."
        )


def _within(name: str, value: float, least: float, below: float, example: str) -> None:
    _finite(name, value)
    if not least <= value < below:
        limit = "" if below == math.inf else f" and below {below:,.16g}"
        raise ConfigError(
            f"{name} is {value}; it must be at least {least:g}{limit}, for example "
            f"--{name.replace('_', '-')} {example}."
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run as a whole."""

    recipe: str | None = None
    """Options that go together, under a name: fast or mission (docs/recipes.md). Flags win over it."""
    run_dir: str | None = None
    """Directory of the run: config, logs, metrics, checkpoints. Default: runs/DATE-TIME-MODEL."""
    resume: bool = False
    """Go on from the newest good checkpoint in --run-dir; without --run-dir, of the newest run in runs/."""
    seed: int = 0
    """Seed of everything: weights, order of the samples, augmentation, dropout."""
    mode: Literal["exact", "fast"] = "exact"
    """exact: the same bits on any number of processes. fast: plain DDP all-reduce, autotuning, TF32."""
    smoke_test: bool = False
    """A few steps of everything (train, evaluate, checkpoint), to see in seconds that it works."""

    def __post_init__(self) -> None:
        if self.recipe is not None:
            recipe_values(self.recipe)


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """Processes, lanes and devices."""

    nproc: int | Literal["auto"] = "auto"
    """Processes on this machine. auto: one per GPU; without GPUs one per CPU core, at most 4."""
    lanes: int | None = None
    """Logical workers. Default: the number of processes at the first start. More lanes than processes is
    gradient accumulation, and what lets the run continue with the same bits on more processes."""
    nnodes: int | str = 1
    """Machines: a number, or MIN:MAX. Run the same command on each of them."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the machine where several machines meet; rank 0 runs there."""
    rdzv_id: str | None = None
    """Name under which the machines meet, if several runs share an endpoint."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU, else cpu."""
    gpus: str | None = None
    """GPUs to use: numbers (0,1), or idle or idle:N for GPUs that nobody uses."""
    gpu_memory_fraction: float | None = None
    """Share of each GPU's memory that this run may take, 0 to 1."""
    lanes_on_oom: bool = False
    """When memory runs out: double the lanes and repeat the step. The bits are those of the new lanes."""
    backend: str | None = None
    """Backend of torch.distributed. Default: nccl on cuda, gloo on cpu."""
    threads: int | None = None
    """CPU threads per process. Default: cores // lanes, at least 1. Kept on resume: it changes bits."""
    timeout_s: float = 300.0
    """Seconds that a process waits for the others in one collective."""
    max_restarts: int = 3
    """How often the processes are started again after one died; no committed step is lost. 0: never."""
    nproc_min: int | None = None
    """Go on with fewer processes, down to this, when the restarts are used up. Default: no fewer."""
    stop_grace_s: float = 30.0
    """Seconds that the processes have to end their step and save when the run is asked to stop."""
    hang_after: float = 60.0
    """Seconds that a process may keep others waiting until it is said who waits where; 0: never."""
    on_hang: Literal["wait", "abort"] = "wait"
    """After the report: go on waiting, or end the run (exit code 1)."""

    def __post_init__(self) -> None:
        if self.nproc != "auto":
            _positive("nproc", self.nproc)
        _positive("lanes", self.lanes)
        _positive("threads", self.threads)
        _positive("timeout_s", self.timeout_s)
        _positive("nproc_min", self.nproc_min)
        _positive("stop_grace_s", self.stop_grace_s)
        _within("timeout_s", self.timeout_s, 0, LONGEST_S, "300")
        _within("stop_grace_s", self.stop_grace_s, 0, LONGEST_S, "30")
        _within("hang_after", self.hang_after, 0, LONGEST_S, "60, or --hang-after 0 for no report")
        if self.max_restarts < 0:
            raise ConfigError(
                f"max_restarts is {self.max_restarts}; it must be 0 or more, such as --max-restarts 3, or "
                "--max-restarts 0 to end the run when a process dies."
            )
        if self.gpu_memory_fraction is not None and not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(
                f"gpu_memory_fraction is {self.gpu_memory_fraction}; it is a share of the memory, so it must "
                "be above 0 and at most 1, for example --gpu-memory-fraction 0.7."
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    data: str = "auto"
    """auto, cifar10, digits, a folder, an archive (.tar[.gz|.xz], .zip), an .npz, or module:callable."""
    data_dir: str = "data"
    """Where cifar10 is looked for and downloaded to."""
    cache_dir: str | None = None
    """Where decoded images are kept. Default: $XDG_CACHE_HOME/evenstep or ~/.cache/evenstep."""
    augment: bool = False
    """Random crop, random horizontal flip, and normalisation."""
    crop_padding: int = 4
    """--augment: pixels that an image may be shifted by in each direction; 0: no crop."""
    crop_border: Literal["zeros", "reflect"] = "zeros"
    """--augment: what is seen beyond the edge of a shifted image: zeros, or the image mirrored there."""
    flip: Literal["random", "alternate", "none"] = "random"
    """--augment: alternate: each image in one epoch as it is and in the next mirrored."""
    image_sizes: str | None = None
    """Sizes in pixels that images are scaled to, epoch by epoch, the last one to the end (16,24,24,32).
    Evaluation has the size of the epoch before it. Default: no scaling."""
    workers: int = 0
    """DataLoader worker processes per process, for your own Datasets."""
    memory_format: Literal["auto", "channels_last", "contiguous"] = "auto"
    """Order of a batch of images in memory; it changes speed and bits. auto: channels_last for images that
    evenstep decodes and for its own models, else as your Dataset makes them."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"workers is {self.workers}; it must be 0 or more, for example --workers 2.")
        if self.crop_padding < 0:
            raise ConfigError(
                f"crop_padding is {self.crop_padding}; it must be 0 (no crop) or more pixels, such as "
                "--crop-padding 4."
            )
        if self.image_sizes is not None:
            sizes_of(self.image_sizes)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model."""

    model: str = "net"
    """net, resnet9, whitenet, or module:callable (called with num_classes if it takes it)."""
    compile: bool = False
    """Run the model through torch.compile."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the forward pass; the weights stay fp32. auto: bf16 where the device computes it itself,
    else fp32; chosen at the first start, and kept on resume."""
    unused_parameters: Literal["error", "allow"] = "error"
    """What to do when a parameter gets no gradient."""
    batchnorm: Literal["lane", "global"] = "lane"
    """What BatchNorm normalises with: each lane's own samples, or the whole global batch (slower)."""

    def __post_init__(self) -> None:
        if ":" not in self.model and self.model not in MODELS:
            raise ConfigError(
                f"unknown model {self.model!r}.{did_you_mean(self.model, MODELS)} Choose one of "
                f"{', '.join(MODELS)}, or your own with --model module:callable."
            )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimisation."""

    batch_size: int = 128
    """Samples per optimizer step over all processes (the global batch)."""
    epochs: int = 10
    """Passes over the training data; the learning-rate schedule is laid over them."""
    steps: int | None = None
    """Stop at this step, wherever the epoch stands."""
    optimizer: Literal["sgd", "adam", "adamw", "muon"] = "sgd"
    """Optimizer."""
    lr: float | None = None
    """Learning rate. Default: 0.05 for sgd, 0.001 for adam and adamw, 0.24 for muon."""
    lr_rest: float | None = None
    """muon: learning rate of biases, normalisation layers and the last layer. Default: that of sgd."""
    momentum: float = 0.9
    """Momentum of sgd and muon."""
    nesterov: bool = False
    """Nesterov momentum for sgd; muon always has it."""
    weight_decay: float = 0.0
    """Weight decay (not applied to biases and normalisation layers)."""
    lr_schedule: Literal["step", "linear", "cosine", "onecycle", "constant"] = "step"
    """How the learning rate changes."""
    lr_decay: float = 0.3
    """step: the factor."""
    lr_decay_epochs: int = 5
    """step: epochs between two decays."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up from 0, for step, linear, cosine and constant."""
    clip_norm: float | None = None
    """Clip the norm of the whole gradient to this."""
    loss: str = CROSS_ENTROPY
    """cross_entropy, or module:callable: loss(model, batch), the mean over the samples of the batch."""
    label_smoothing: float = 0.0
    """cross_entropy: label smoothing of the training loss, 0 to 1."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, and evaluate it."""

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "epochs",
            "steps",
            "lr",
            "lr_rest",
            "lr_decay",
            "lr_decay_epochs",
            "clip_norm",
        ):
            _positive(name, getattr(self, name))
        _within("momentum", self.momentum, 0, 1, "0.9")
        _within("weight_decay", self.weight_decay, 0, math.inf, "0.0005")
        _within("warmup_epochs", self.warmup_epochs, 0, math.inf, "5")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}; it must be at least 0 and below 1, for example "
                "--label-smoothing 0.1."
            )
        if ":" not in self.loss and self.loss != CROSS_ENTROPY:
            raise ConfigError(
                f"unknown loss {self.loss!r}.{did_you_mean(self.loss, [CROSS_ENTROPY])} Use --loss "
                f"{CROSS_ENTROPY}, or your own with --loss module:callable."
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(
                f"ema_decay is {self.ema_decay}; it must be between 0 and 1, for example --ema-decay 0.999."
            )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Evaluation, checkpoints and what is shown."""

    evaluate_every: int = 1
    """Epochs between evaluations; the end of the run is always evaluated."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; the end of the run is always saved."""
    checkpoint_every_steps: int | None = None
    """Steps between checkpoints, besides those at the ends of epochs."""
    tta: Literal["none", "flip", "flip_shift"] = "none"
    """Test-time augmentation, the mean of the logits of several views. flip: each image as it is and
    mirrored. flip_shift: these two also shifted by a pixel up and left, and down and right."""
    metrics: str | None = None
    """module:callable: metrics(model, batch), measured in evaluations: for each name one value a sample."""
    keep: int = 3
    """How many checkpoints to keep, besides the best one."""
    check_every: int = 100
    """Steps between two checks that all processes hold the same weights, besides one before each
    checkpoint; 0: never."""
    log_every: int = 20
    """Steps between two lines in metrics.jsonl."""
    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that goes into the log files."""
    log_rotation: str = "12:00"
    """When a log file is rotated: a time of day, a size (10 MB) or an age (1 week)."""
    log_diagnose: bool = False
    """Write the values of variables into logged tracebacks. They may hold secrets, so it is off."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard, too."""
    track: Literal["wandb", "mlflow", "trackio"] | None = None
    """Send the metrics to an experiment tracker, too, through its own library and its own configuration."""
    json: bool = False
    """Print one JSON object with the results as the last line of stdout."""
    quiet: bool = False
    """Print only the result and errors."""

    def __post_init__(self) -> None:
        for name in ("evaluate_every", "checkpoint_every", "checkpoint_every_steps", "keep", "log_every"):
            _positive(name, getattr(self, name))
        if self.metrics is not None and ":" not in self.metrics:
            raise ConfigError(
                f"metrics is {self.metrics!r}; it must name a function of yours as module:callable, such as "
                "--metrics my_project:metrics. Loss and accuracy are measured without it."
            )
        if self.check_every < 0:
            raise ConfigError(
                f"check_every is {self.check_every}; it must be 0 or more, for example --check-every 100, "
                "or --check-every 0 for never."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All options of ``evenstep train``."""

    run: RunConfig = field(default_factory=RunConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        lanes = self.process.lanes
        if lanes is not None and self.process.nproc != "auto" and self.process.nproc > lanes:
            raise ConfigError(
                f"nproc {self.process.nproc} is above lanes {lanes}: each process needs a lane of its own. "
                f"Use --nproc {lanes} or fewer, or --lanes {self.process.nproc} or more."
            )
        least = lanes or (self.process.nproc if self.process.nproc != "auto" else 1)
        check_batch_size(self.optim.batch_size, least)


def sizes_of(image_sizes: str) -> tuple[int, ...]:
    """Return the sizes in pixels that ``--image-sizes`` gives, one for each epoch.

    Args:
        image_sizes: whole numbers with commas between them.

    Raises:
        ConfigError: it is anything else.
    """
    parts = [part.strip() for part in image_sizes.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"image_sizes is {image_sizes!r}; expected whole numbers above 0 with commas between them, one "
            "for each epoch, such as --image-sizes 16,24,24,32."
        )
    return tuple(int(part) for part in parts)


def check_batch_size(batch_size: int, lanes: int) -> None:
    """Raise ConfigError if a lane would be empty in every step."""
    if batch_size < lanes:
        raise ConfigError(
            f"batch_size {batch_size} is smaller than lanes {lanes}: some lanes would never get a sample. "
            f"Use --batch-size {lanes} or more, or --lanes {batch_size} or fewer."
        )
