"""What the user sees of a run, on rank 0, and the files of metrics that it leaves.

Results go to stdout, everything else to stderr. Nothing here imports torch, except for TensorBoard.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import tqdm
from loguru import logger

from evenstep import report
from evenstep.banner import Facts, banner, group_lines
from evenstep.config import TrainConfig
from evenstep.errors import MachineError, StoppedError
from evenstep.flat import from_flat, to_flat
from evenstep.metrics import RateMeter
from evenstep.records import MetricsFile, save_config, start_line
from evenstep.timing import Times, slowest
from evenstep.track import Tracker, open_tracker
from evenstep.world import World


class Reporter:
    """Shows a run and keeps its metrics; on ranks other than 0 every method does nothing.

    With a terminal there is a progress bar, ``Iter (loss=0.123)``; otherwise plain lines. A context manager.

    Args:
        config: the options of the run.
        world: this process.
        stream: where to show it; stderr by default.
    """

    def __init__(self, config: TrainConfig, world: World, stream: TextIO | None = None) -> None:
        self._config = config
        self._world = world
        self._active = world.is_first
        self._stream = stream or sys.stderr
        self._shown = self._active and not config.output.quiet
        self._bar: tqdm.tqdm[Any] | None = None
        self._metrics: MetricsFile | None = None
        self._board: Any = None
        self._tracker: Tracker | None = None
        self._report: report.Refresher | None = None
        self._facts: Facts | None = None
        self._times: Times | None = None
        self._begun = time.perf_counter()
        self._meter, self._images = RateMeter(), 0

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # After a failure a restart waits for us, and the report has nothing new to say.
        if kind is not None and issubclass(kind, StoppedError):
            self._refresh(at_last=True)
        self.close()

    def start(self, facts: Facts) -> None:
        """Show the banner, write config.toml, open the files of metrics.

        Raises:
            MachineError: TensorBoard or a tracker was asked for and is not installed.
        """
        if not self._active:
            return
        self._facts = facts
        if facts.precision is not None:
            self._config = from_flat({"precision": facts.precision}, self._config)
        if not self._world.restart:  # a restart has said its line (recovery.py)
            for line in banner(self._config, self._world, facts):
                self.message(line)
        if self._world.run_dir is not None:
            run_dir = Path(self._world.run_dir)
            run_dir.mkdir(parents=True, exist_ok=True)
            save_config(self._config, run_dir, self._world)
            self._metrics = MetricsFile(run_dir / "metrics.jsonl", facts.start_step, facts.repeats)
            self._metrics.write(
                **start_line(
                    self._world,
                    step=facts.start_step,
                    epoch=facts.start_epoch,
                    data=facts.data,
                    num_parameters=facts.num_parameters,
                    total_steps=facts.total_steps,
                )
            )
            self._report = report.Refresher(run_dir)
            stale = (
                (report.RESULT,) if facts.start_step else (report.RESULT, report.EVALUATION, report.REPORT)
            )
            for name in stale:
                (run_dir / name).unlink(missing_ok=True)
            if self._config.output.track:
                self._tracker = open_tracker(
                    self._config.output.track,
                    run_dir,
                    to_flat(self._config),
                    resumed=bool(facts.start_step or self._world.restart),
                )
            if self._config.output.tensorboard:
                self._board = _open_board(run_dir / "tensorboard", facts.first_step - 1)
        if self._shown and self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=facts.total_steps,
                initial=facts.first_step - 1,
                desc="Iter (loss=-)",
                unit="step",
                file=self._stream,
                **_bar_size(self._stream),
            )
        self._begun = time.perf_counter()
        self._meter.restart_clock()

    def step(
        self, step: int, epoch: int, loss: Any, lr: float, images: int, grad_norm: float | None = None
    ) -> None:
        """Report a committed step. Only every ``log_every``-th step is read from the GPU and written.

        Args:
            step: how many steps are committed now.
            epoch: the epoch of this step, from 0.
            loss: a number or a tensor with one element.
            lr: the learning rate of this step.
            images: samples in this step's global batch.
            grad_norm: norm of the whole gradient, where it is known.
        """
        if not self._active:
            return
        facts = self._facts
        if facts is not None and step == facts.first_step and (self._world.restart or facts.repeats):
            # It may have been done before the failure, and take no time now. It says nothing about the speed.
            self._meter.restart_clock()
        else:
            self._images += images
        if self._bar is not None:
            self._bar.update(1)
        total = self._facts.total_steps if self._facts else None
        if step % self._config.output.log_every and step != total:
            return
        value = float(loss)
        self._meter.update(self._images)
        self._images, rate = 0, self._meter.current_per_s
        speed = "" if rate is None else f"{rate:,.0f} images/s"
        extra = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
        images_per_s = None if rate is None else round(rate, 1)
        self._write("train", step, epoch, loss=value, lr=lr, images_per_s=images_per_s, **extra)
        if self._bar is not None:
            self._bar.set_description_str(f"Iter (loss={value:.3f})", refresh=False)
            self._bar.set_postfix_str(f"epoch {epoch}, {speed}")
        else:
            of = "" if total is None else f"/{total}"
            self.message(
                f"step {step}{of}  epoch {epoch}  loss {value:.4f}  lr {lr:.3g}  {speed}"
                + self._eta(step, total)
            )

    def evaluation(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Report the numbers of an evaluation after ``step`` steps."""
        self._write("eval", step, epoch, **metrics)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "samples")
        samples = f"  ({int(metrics['samples']):,} images)" if "samples" in metrics else ""
        self.message(f"evaluation after step {step}: {shown}{samples}")
        self._refresh()
        self._forget_time()

    def times(self, step: int, epoch: int, times: Times) -> None:
        """Keep where the time of every rank went."""
        self._times = times
        self._write(
            "time",
            step,
            epoch,
            steps=times.steps,
            data_s=[round(value, 4) for value in times.data_s],
            step_s=[round(value, 4) for value in times.step_s],
            wait_s=[None if value is None else round(value, 4) for value in times.wait_s],
        )

    def checkpoint(self, step: int, epoch: int, path: str | Path) -> None:
        """Report a checkpoint that was written."""
        self._write("checkpoint", step, epoch, path=str(path))
        self.message(f"saved {path}")
        self._forget_time()

    def epoch_end(self, step: int, epoch: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Log the learning rate and the optimizer's groups at the end of an epoch."""
        if self._active:
            for line in group_lines(groups):
                logger.info("epoch {} done at step {}: {}", epoch, step, line)

    def finish(self, result: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> None:
        """Keep the result of the run and write its report.

        Args:
            result: what ``evenstep train --json`` prints.
            evaluation: what ``predictions.summary`` says of the last evaluation.
        """
        line = None if self._times is None else slowest(self._times)
        if line is not None:
            self.message(line)
        if self._report is None:
            return
        run_dir = self._report.path.parent
        try:
            report.write_whole(run_dir / report.RESULT, report.to_json(result) + "\n")
            if evaluation is not None:
                report.write_whole(run_dir / report.EVALUATION, report.to_json(evaluation) + "\n")
        except MachineError as error:  # the run itself is done and saved
            logger.warning("{}", error)
        self._refresh(at_last=True)
        if self._report.error is None:
            self.message(f"report {self._report.path}")

    def _forget_time(self) -> None:
        self._meter.restart_clock()
        self._images = 0

    def message(self, text: str) -> None:
        """Show a line without breaking the bar."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Close the bar and the files. May be called twice."""
        for part in (self._bar, self._metrics, self._board, self._tracker):
            if part is not None:
                part.close()
        self._bar = self._metrics = self._board = self._tracker = None

    def _write(self, kind: str, step: int, epoch: int, **values: Any) -> None:
        if self._metrics is not None:
            wall_s = round(time.perf_counter() - self._begun, 3)
            self._metrics.write(kind=kind, step=step, epoch=epoch, **values, wall_s=wall_s)
        if kind not in ("train", "eval"):
            return
        numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, (int, float))}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._tracker is not None:
            try:
                self._tracker.log(numbers, step)
            except Exception as error:  # its server is away: no reason to end a training
                self._tracker = None
                text = f"--track stops at step {step}: {type(error).__name__}: {error}"
                logger.warning("{}", text)
                self.message(text)

    def _refresh(self, *, at_last: bool = False) -> None:
        if self._report is None:
            return
        before = self._report.error
        self._report.refresh(at_last=at_last)
        if self._report.error is not None and (before is None or at_last):
            self.message(f"no report: {self._report.error}")

    def _eta(self, step: int, total: int | None) -> str:
        start = self._facts.start_step if self._facts else 0
        if total is None or step <= start:
            return ""
        seconds = (time.perf_counter() - self._begun) / (step - start) * (total - step)
        return f"  ETA {tqdm.tqdm.format_interval(seconds)}"


def _bar_size(stream: TextIO) -> dict[str, Any]:
    """Return tqdm's options for the bar's width: that of the terminal, or 100 where it tells none.

    A pseudo-terminal of a container or of CI may say that it has 0 columns and rows; tqdm then shows nothing.
    """
    with contextlib.suppress(OSError, ValueError):
        size = os.get_terminal_size(stream.fileno())
        if size.columns == 0 or size.lines == 0:
            return {"ncols": size.columns or 100, "nrows": size.lines or 24}
    return {"dynamic_ncols": True}


def _open_board(path: Path, start_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MachineError(
            f"--tensorboard needs the package tensorboard, which is not installed ({error}). The metrics "
            "would be missing there without notice. Install it (pip install 'evenstep[tensorboard]'), or "
            "leave the flag out: metrics.jsonl has the same numbers."
        ) from None
    return SummaryWriter(str(path), purge_step=start_step + 1 if start_step else None)
