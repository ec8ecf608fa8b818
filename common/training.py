"""The state of a run in training, which update, evaluation and saving act on."""

import time
from dataclasses import dataclass, field
from typing import Any

from common import optim
from common.batches import EvalBatches, GlobalBatches
from common.device import LossScale, Setup
from common.engine import Engine
from common.progress import Progress
from common.report import Report
from common.run_length import RunLength
from common.task import Task


@dataclass
class Training:
    """A run in training."""

    args: object
    setup: Setup
    task: Task
    length: RunLength
    engine: Engine
    schedule: optim.Schedule
    loss_scale: LossScale | None
    global_batches: GlobalBatches
    eval_batches: EvalBatches
    progress: Progress
    report: Report
    utilisation: Any = None  # readings of the GPU (`parts.utilisation`)
    last_saved: int = -1  # the update after which the last checkpoint was saved
    saved_at: float = field(default_factory=time.monotonic)  # its time, or that of the beginning
    is_late: bool = False  # whether that is SAVE_SECONDS ago
    unreadable: int = 0  # files in a row that were skipped
    caught: int = 0  # the number of a signal
    skipped: set[str] = field(default_factory=set)  # files that were reported
    # The time of the last report and, since then, seconds spent waiting for data and utterances.
    since: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    utterances: int = 0
    micro_batches: int = 0  # since the last call of torch.cuda.empty_cache()
