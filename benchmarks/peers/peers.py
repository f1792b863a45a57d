"""The peers: how each is started, and how its times are read."""

from dataclasses import dataclass
from pathlib import Path

from watching import Lines, read_json

BATCH_SIZE = 128
WARM_STEPS = 10
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Script:
    """A script of this folder, which prints its own times as one line of JSON."""

    file: str
    torchrun: bool = False
    flags: tuple[str, ...] = ()

    def words(self, args, scratch):
        """Return the command line. ``{now}`` stands for the time at which it is started."""
        start = [args.python]
        if self.torchrun:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc)]
        words = [*start, str(HERE / self.file), "--data", str(args.data), "--eval", str(args.eval)]
        words += ["--epochs", str(args.epochs), "--processes", str(args.nproc), "--started", "{now}"]
        words += ["--steps", str(args.steps)] if args.steps else []
        words += ["--augment"] if args.augment else []
        return [*words, *self.flags]

    def reading(self, args):
        """Return the function that makes the times of what the run has printed."""
        return read_json


@dataclass(frozen=True)
class Command:
    """``evenstep train``, as a user starts it. It prints no times of steps, so its lines are timed."""

    flags: tuple[str, ...] = ()

    def words(self, args, scratch):
        """Return the command line."""
        words = [str(Path(args.python).with_name("evenstep")), "train"]
        words += ["--data", str(args.data / f"data-{args.eval}.npz"), "--cache-dir", str(args.data / "cache")]
        words += ["--run-dir", str(scratch / "run"), "--nproc", str(args.nproc), "--threads", "1"]
        words += ["--device", "cpu", "--batch-size", str(BATCH_SIZE), "--epochs", str(args.epochs)]
        words += ["--optimizer", "sgd", "--lr", "0.05", "--momentum", "0.9", "--model", "net"]
        words += ["--log-every", "1", "--json"]
        words += ["--steps", str(args.steps)] if args.steps else []
        words += ["--augment"] if args.augment else []
        return [*words, *self.flags]

    def reading(self, args):
        """Return the function that makes the times of what the run has printed."""
        return lambda lines, started: read_command(lines, started, args.eval)


def read_command(lines: Lines, started: float, eval_images: int) -> dict:
    """Return the times of one ``evenstep train`` from the lines that it has printed and when.

    Args:
        lines: of stdout and stderr, with their times.
        started: when the command was started.
        eval_images: test images of each evaluation.
    """
    at, evaluations, counted, eval_s, steady_s = {}, 0, 0, 0.0, 0.0
    previous, ended_at = None, None
    for when, text in lines:
        words = text.split()
        if text.startswith("step "):
            step = int(words[1].split("/")[0].replace(",", ""))
            at[step] = ended_at = when
            if previous is not None and previous[1] >= WARM_STEPS:
                steady_s += when - previous[0]
            previous = (when, step)
        elif text.startswith("evaluation after step"):
            evaluations += 1
            counted = int(text.rpartition("(")[2].split()[0].replace(",", ""))
            eval_s += when - ended_at
            previous, ended_at = (when, previous[1]), when
    last = max(at)
    return {
        "launch_to_first_step_s": at[1] - started if 1 in at else None,
        "steady_images_per_s": (last - WARM_STEPS) * BATCH_SIZE / steady_s if steady_s else None,
        "eval_images_per_s": evaluations * eval_images / eval_s if eval_s else None,
        "test_samples": counted,
        "steps": last,
        "ended_at": ended_at,
    }


BASELINE = "handwritten_spawn"
TUNED, TUNED_BF16, TUNED_POOL_FIRST = "tuned", "tuned_bf16", "tuned_pool_first"
_FAST, _BF16 = ("--mode", "fast"), ("--precision", "bf16")
PEERS = {
    BASELINE: Script("handwritten_spawn.py"),
    "handwritten_torchrun": Script("handwritten_torchrun.py", torchrun=True),
    "accelerate": Script("peer_accelerate.py", torchrun=True),
    "fabric": Script("peer_fabric.py"),
    "trainer": Script("peer_trainer.py"),
    "ignite": Script("peer_ignite.py"),
    "ray": Script("peer_ray.py"),
    "torchft": Script("peer_torchft.py"),
    TUNED: Script("tuned.py"),
    TUNED_POOL_FIRST: Script("tuned.py", flags=("--pool-first",)),
    TUNED_BF16: Script("tuned.py", flags=_BF16),
    "evenstep": Command(),
    "evenstep_fast": Command(_FAST),
    "evenstep_bf16": Command(_BF16),
    "evenstep_fast_bf16": Command((*_FAST, *_BF16)),
    "evenstep_loop": Script("peer_evenstep.py"),
    "evenstep_loop_bf16": Script("peer_evenstep.py", flags=_BF16),
    "evenstep_loop_dataset": Script("peer_evenstep.py", flags=("--own-dataset",)),
}
