"""Reports of a run: progress bar, metrics.jsonl, training.png. They read numbers on
the host only."""

import collections
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from common.errors import cannot_write, require, writing
from common.files import write_file, write_text

PLAIN_SECONDS = 10  # between progress lines if stderr is not a terminal
RECENT = 100  # updates, by which the time left is estimated: later ones may be longer
ERROR_RATES = ("cer", "wer")  # which are shown in per cent


def shown(metric: str, value: float) -> str:
    """The value of a metric as text; error rates in per cent."""
    return f"{100 * value:.2f} %" if metric in ERROR_RATES else f"{value:.3f}"


def _print(text: str, stream) -> None:
    """Prints a line, or drops it: Ctrl-C in `... | tee log` ends tee before the run is saved."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def check_folder(log_dir: Path) -> None:
    """Creates the folder. Raises `RunError` if nothing can be written in it."""
    with writing(log_dir, "--output_dir"):
        log_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=log_dir).close()


class Report:
    """The reports of one run, which starts at update `step`. Later metrics of an earlier attempt
    are removed. If a report cannot be written, `problem` is the error, and nothing more is written:
    the run decides when to end."""

    def __init__(self, log_dir: Path, step: int, total_steps: int, enabled: bool = True):
        self.log_dir = log_dir
        self.total = total_steps
        self.enabled = enabled
        self.bar = None
        self.metrics = None
        self.problem = None
        self.last_line = time.monotonic()
        self.ends = collections.deque([self.last_line], maxlen=RECENT + 1)  # of the last updates
        if not enabled:
            return
        check_folder(log_dir)
        with self._caught():
            self._drop_lines_after(step)
            self.metrics = open(  # noqa: SIM115
                log_dir / "metrics.jsonl", "a", encoding="utf-8", errors="backslashreplace"
            )
        if sys.stderr.isatty():
            width = min(80, shutil.get_terminal_size().columns)
            form = "{n_fmt}/{total_fmt} |{bar}| {desc} {elapsed}<{remaining}"
            self.bar = tqdm(
                total=total_steps, initial=step, ncols=width, bar_format=form, mininterval=0.5
            )

    @contextlib.contextmanager
    def _caught(self):
        try:
            yield
        except OSError as error:
            self.problem = self.problem or cannot_write(self.log_dir, error, "--output_dir")

    def _drop_lines_after(self, step: int) -> None:
        path = self.log_dir / "metrics.jsonl"
        if not path.is_file():
            return
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            # A line is incomplete if the run was killed while it was written.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
        write_text(path, "".join(kept))

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.clear()
        _print(text, sys.stdout)
        if self.bar is not None:
            self.bar.refresh()

    def write(self, step: int, **values) -> None:
        """Writes a line of metrics.jsonl."""
        if not self.enabled or self.problem:
            return
        with self._caught():
            self.metrics.write(json.dumps({"step": step, **values}, ensure_ascii=False) + "\n")
            self.metrics.flush()

    def progress(self, step: int, values: dict[str, float | None]) -> None:
        """Updates the bar, or prints a line every few seconds. `values`: as `update.note_update`
        names them."""
        if not self.enabled:
            return
        now = time.monotonic()
        self.ends.append(now)
        loss = f"loss {values['loss']:.3f}"
        rate = f"lr {values['learning_rate']:.1e}"
        speed = f"{values['utterances_per_second']:.1f}"
        gib = f"{values['memory_bytes'] / 2**30:.1f}"
        wait = f"{values['data_wait_share']:.0%}"
        busy = values["gpu_utilisation"]
        gpu = [] if busy is None else [f"GPU {busy:.0%}"]
        if self.bar is not None:
            text = " ".join([loss, rate, f"{speed}/s", f"{gib}G", f"wait {wait}", *gpu])
            self.bar.set_description_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif now - self.last_line >= PLAIN_SECONDS or step == self.total:
            self.last_line = now
            left = (now - self.ends[0]) / (len(self.ends) - 1) * (self.total - step)
            parts = [f"step {step}/{self.total}", loss, rate, f"{speed} utterances/s", f"{gib} GiB"]
            parts += [f"waiting {wait}", *gpu, f"{left / 60:.0f} min left"]
            _print("  ".join(parts), sys.stderr)

    def close(self) -> None:
        for output in (self.bar, self.metrics):
            with self._caught():
                if output is not None:
                    output.close()
        self.enabled = False

    def draw(self, metric: str) -> None:
        """Draws training.png: losses, learning rate, and the error rates or else `metric`."""
        if self.enabled and not self.problem:
            with self._caught():
                self._draw(metric)

    def _draw(self, metric: str) -> None:
        os.environ["MPLBACKEND"] = "Agg"  # a notebook names one that may not be installed here
        require("matplotlib", "training.png").use("Agg")
        import matplotlib.pyplot as plt

        text = (self.log_dir / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")

        def plot(axes, key: str, scale: float = 1, **style) -> None:
            points = [(line["step"], scale * line[key]) for line in lines if key in line]
            if points:
                axes.plot(*zip(*points, strict=True), **style)

        plot(left, "train/loss", label="training")
        plot(left, "eval/loss", label="evaluation", marker=".")
        left.set(xlabel="updates", ylabel="loss", title="Loss")
        if any("train/learning_rate" in line for line in lines):
            axes = left.twinx()
            plot(axes, "train/learning_rate", color="0.75", linewidth=1)
            axes.set_ylabel("learning rate", color="0.5")
            left.set_zorder(axes.get_zorder() + 1)
            left.patch.set_visible(False)
        rates = [name for name in ERROR_RATES if any(f"eval/{name}" in line for line in lines)]
        for name in rates or [metric]:
            label, scale = (name.upper(), 100) if rates else (name, 1)
            plot(right, f"eval/{name}", scale, label=label, marker=".")
        scale = 100 if metric in ERROR_RATES else 1
        for key in sorted({key for line in lines for key in line}):
            if key.count("/") > 1 and key.endswith(f"/{metric}"):  # of a further set
                label = key.removesuffix(f"/{metric}").replace("/", " ", 1)
                plot(right, key, scale, label=label, marker=".", linestyle="--")
        right.set(xlabel="updates", ylabel="%" if rates else metric, title="Evaluation set")
        if right.get_ylim()[0] > 0:
            right.set_ylim(bottom=0)
        for axes in (left, right):
            if axes.lines:
                axes.legend(loc="best")  # where it hides the least
        path = self.log_dir / "training.png"
        write_file(
            path, lambda temporary: figure.savefig(temporary, format="png", dpi=120), durable=False
        )
        plt.close(figure)
