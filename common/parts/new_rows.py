"""Rows of weights that were drawn at random in a model whose other weights are trained, such as the
embeddings of new tokens. They have a peak learning rate of their own, on the schedule of all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine import Engine


@dataclass(frozen=True)
class NewRows:
    """{parameter name: row numbers}, and their peak learning rate, at least that of the others."""

    rows: dict[str, Sequence[int]]
    learning_rate: float

    def record(self) -> dict:
        """The fields of a NewRows, for a checkpoint."""
        rows = {name: list(map(int, numbers)) for name, numbers in self.rows.items()}
        return {"rows": rows, "learning_rate": self.learning_rate}


def speed_up(engine: Engine, new_rows: NewRows) -> None:
    """Makes `new_rows` learn at their own rate, with every engine and optimizer. Frozen parameters
    stay as they are.

    AdamW's step is w - rate * (decay * w + u), and u depends on the gradients alone. So the rows
    are zero during a step, which leaves -rate * u of them, to the last digits. A step with another
    rate follows from it."""
    optimizer = engine.optimizer
    groups = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    chosen = []
    for name, rows in new_rows.rows.items():
        parameter = engine.network.get_parameter(name)
        weight, first = engine.rows(engine.values(parameter))
        rows = [row - first for row in rows if first <= row < first + len(weight)]
        places = torch.tensor(rows, dtype=torch.long, device=weight.device)
        chosen += [(group, p, weight, places) for group, p in groups if p is parameter]
    before = []

    @torch.no_grad()
    def take_out(*arguments) -> None:
        present = engine.gradients()
        for group, p, weight, places in chosen:
            if p in present:
                before.append((group, p, weight, places, weight[places]))
                weight[places] = 0.0

    @torch.no_grad()
    def put_back(*arguments) -> None:
        while before:
            group, p, weight, places, values = before.pop()
            ratio = max(1.0, new_rows.learning_rate / group["initial_lr"])
            decay = ratio * group["lr"] * group["weight_decay"]
            weight[places] = values * (1 - decay) + ratio * weight[places]
            if weight.dtype != p.dtype:
                p[places.to(p.device)] = weight[places].to(p)

    optimizer.register_step_pre_hook(take_out)
    optimizer.register_step_post_hook(put_back)
