"""Predicts the peak of GPU memory of a training step, without a GPU: the step runs on tensors
without values."""

from dry_run.cards import choose_card
from dry_run.fake_tensors import CannotPlan
from dry_run.planned_run import Evaluation, PlannedRun, longest_items

__all__ = ["CannotPlan", "Evaluation", "PlannedRun", "choose_card", "longest_items"]
