"""What a run says about itself: the bar, metrics.jsonl, TensorBoard, training.png. Reads only what the host has."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from tqdm import tqdm

from common.errors import cannot_write, require

PLAIN_SECONDS = 10  # between progress lines where stderr is no terminal


def check_folder(log_dir: Path) -> None:
    """Raises `RunError` now where reports could not be written later."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        (log_dir / ".writable").touch()
        (log_dir / ".writable").unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(log_dir, error, "--log_dir") from None


class Report:
    """One run's progress. `step` is the update at which it starts; later lines of an earlier attempt are dropped."""

    def __init__(self, log_dir: Path, step: int, total_steps: int, tensorboard: bool = True, enabled: bool = True):
        self.log_dir, self.step, self.total, self.enabled = log_dir, step, total_steps, enabled
        self.bar = self.events = self.metrics = None
        self.last_line = self.started = time.monotonic()
        self.first_step = step
        if not enabled:
            return
        check_folder(log_dir)
        self._drop_lines_after(step)
        self.metrics = open(log_dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        if tensorboard:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
            writer = require("torch.utils.tensorboard", "--tensorboard (on by default)").SummaryWriter
            self.events = writer(str(log_dir), purge_step=step + 1 if step else None)
        if sys.stderr.isatty():
            width = min(80, shutil.get_terminal_size().columns)
            form = "{n_fmt}/{total_fmt} |{bar}| {desc} {elapsed}<{remaining}"
            self.bar = tqdm(
                total=total_steps, initial=step, ncols=width, bar_format=form, file=sys.stderr, mininterval=0.5
            )

    def _drop_lines_after(self, step: int) -> None:
        path = self.log_dir / "metrics.jsonl"
        if path.exists():
            kept = []
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    continue  # the line that a kill cut short
            path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def say(self, text: str) -> None:
        """A line for people, above the bar."""
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.clear()
        print(text, flush=True)
        if self.bar is not None:
            self.bar.refresh()

    def write(self, step: int, **values) -> None:
        """A line of metrics.jsonl; its numbers go to TensorBoard too."""
        if not self.enabled:
            return
        self.metrics.write(json.dumps({"step": step, **values}, ensure_ascii=False) + "\n")
        self.metrics.flush()
        if self.events is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.events.add_scalar(name, value, step)

    def progress(
        self, step: int, loss: float, rate: float, speed: float, memory: int, waiting: float, busy: float | None = None
    ) -> None:
        """Moves the bar, or prints a plain line every few seconds. `speed`: utterances per second; `memory`: bytes;
        `waiting`: share of the time spent waiting for data; `busy`: of the time in which the GPU computed, or None."""
        if not self.enabled:
            return
        if self.bar is not None:
            text = f"loss {loss:.3f} lr {rate:.1e} {speed:.1f}/s {memory / 2**30:.1f}G wait {waiting:.0%}"
            self.bar.set_description_str(text if busy is None else f"{text} GPU {busy:.0%}", refresh=False)
            self.bar.update(step - self.bar.n)
        elif time.monotonic() - self.last_line >= PLAIN_SECONDS or step == self.total:
            self.last_line = time.monotonic()
            left = (self.last_line - self.started) / max(1, step - self.first_step) * (self.total - step)
            print(
                f"step {step}/{self.total}  loss {loss:.3f}  lr {rate:.1e}  {speed:.1f} utterances/s  "
                f"{memory / 2**30:.1f} GiB  waiting {waiting:.0%}  "
                f"{'' if busy is None else f'GPU {busy:.0%}  '}{left / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.events is not None:
            self.events.close()
        if self.metrics is not None:
            self.metrics.close()
        self.enabled = False

    def draw(self, metric: str) -> None:
        """training.png: training loss and learning rate, evaluation loss, and the metric that chooses the best."""
        if not self.enabled:
            return
        matplotlib = require("matplotlib", "training.png")
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        lines = [json.loads(line) for line in (self.log_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        for key, label in (("train/loss", "training"), ("eval/loss", "evaluation")):
            points = [(line["step"], line[key]) for line in lines if key in line]
            if points:
                left.plot(*zip(*points, strict=True), label=label, marker="." if key.startswith("eval") else None)
        left.set(xlabel="updates", ylabel="loss", title="Loss")
        if left.lines:
            left.legend(loc="upper right")
        rates = [(line["step"], line["train/learning_rate"]) for line in lines if "train/learning_rate" in line]
        if rates:
            axis = left.twinx()
            axis.plot(*zip(*rates, strict=True), color="0.75", linewidth=1)
            axis.set_ylabel("learning rate", color="0.5")
            left.set_zorder(axis.get_zorder() + 1)
            left.patch.set_visible(False)
        shown = [name for name in ("cer", "wer") if any(f"eval/{name}" in line for line in lines)] or [metric]
        for name in shown:
            points = [(line["step"], 100 * line[f"eval/{name}"]) for line in lines if f"eval/{name}" in line]
            if points:
                right.plot(*zip(*points, strict=True), label=name.upper(), marker=".")
        right.set(xlabel="updates", ylabel="%", title="Error on the evaluation set", ylim=(0, None))
        if right.lines:
            right.legend(loc="upper right")
        temporary = self.log_dir / "training.png.tmp"
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, self.log_dir / "training.png")
        plt.close(figure)
