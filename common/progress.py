"""How far a run is: what a checkpoint says of it besides weights, optimizer and random numbers."""

from dataclasses import dataclass, field


@dataclass
class Progress:
    """The progress of a run, in plain numbers, lists and dictionaries.

    The position in the data is `epoch` and `global_batch` (the next one of the epoch). `data` and
    `order` identify the data and their order, `origin` is the update and the epoch at which the run
    got these data, `counted` those from which on epochs have as many updates as now (None:
    `origin`). `evaluations` lists [update, value of the metric]. `augmented_share` is that of the
    present epoch (`Task.augmented_share`), `overfits` whether the loss of the last evaluation was
    higher than that of an earlier one. `limits` are the sizes of micro-batches that fit, by length
    bucket, on the `device`. `stop`: a set that is evaluated besides ends the run. `base` is the
    path of the released weights at the root of this run. `parts` has what parts of `common/parts`
    keep, by their names."""

    step: int = 0
    epoch: int = 0
    global_batch: int = 0
    global_batch_size: int = 0
    data: str = ""
    order: str = ""
    origin: list[int] = field(default_factory=lambda: [0, 0])
    counted: list[int] | None = None
    utterances: int = 0
    best: float | None = None
    best_step: int = 0
    last_evaluation: int = 0
    evaluations: list[list] = field(default_factory=list)
    evaluations_without_gain: int = 0
    lowest_loss: float | None = None
    overfits: bool = False
    stop: bool = False
    bad_batches: int = 0
    bad_in_a_row: int = 0
    skipped_files: int = 0
    augmented_share: float = 1.0
    limits: dict = field(default_factory=dict)
    device: str = ""
    schedule: dict | None = None
    base: str | None = None
    parts: dict = field(default_factory=dict)
