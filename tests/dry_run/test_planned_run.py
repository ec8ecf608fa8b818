"""What is planned of a training: its longest utterances, its settings, the answer, and the loop's
part in it."""

import dataclasses
import functools
import re
import types

import numpy as np
import pytest
import torch
from torch import nn

from common import loop, memory, optim, options
from common.batches import GlobalBatches
from common.errors import DataError, Planned, RunError, UsageError
from common.parts import preflight
from dry_run.advice import PlannedSettings
from dry_run.cards import Card
from dry_run.fake_tensors import CannotPlan
from dry_run.planned_run import FIRST, Evaluation, PlannedRun, longest_items, repeated
from tests import small


class Lengths:
    """A data set of lengths that change with the epoch, and of targets."""

    def __init__(self, seconds: list[list[float]], targets: list[int], bad: tuple[int, ...] = ()):
        self.table, self.targets, self.bad = np.array(seconds), targets, bad

    def seconds(self, epoch: int) -> np.ndarray:
        return self.table[epoch % len(self.table)]

    def item(self, index: int, epoch: int) -> dict:
        if index in self.bad:
            raise DataError(f"utterance {index} is damaged")
        return {
            "index": index,
            "seconds": float(self.seconds(epoch)[index]),
            "targets": self.targets[index],
        }


def found(data: Lengths, epochs: int = 1, skip_bad: bool = False) -> list[dict]:
    dataset = types.SimpleNamespace(data=data, collate=collate, skip_bad=skip_bad)
    return longest_items(dataset, epochs, DataError)


def collate(items: list[dict]) -> dict:
    return {
        "names": [str(item["index"]) for item in items],
        "seconds": [item["seconds"] for item in items],
        "counts": {"loss": sum(item["targets"] for item in items)},
    }


def test_the_longest_utterances_of_all_epochs_come_first():
    data = Lengths([[3, 2, 1, 1], [1, 5, 1, 1], [1, 1, 4, 1]], [1, 1, 1, 1])
    for epochs, expected in (
        (3, [(1, 5), (2, 4), (0, 3), (3, 1)]),
        (1, [*enumerate((3, 2, 1, 1))]),
    ):
        items = found(data, epochs)
        assert [(item["index"], item["seconds"]) for item in items] == expected


def test_the_utterance_with_the_most_targets_is_second():
    items = found(Lengths([[5, 4, 3, 2]], [7, 1, 90, 3]))
    assert [item["index"] for item in items] == [0, 2, 1, 3]
    items = found(Lengths([[5, 4, 3, 2]], [70, 1, 9, 3]))
    assert [item["index"] for item in items] == [0, 1, 2, 3]


def test_the_longest_text_is_looked_at_and_decides_among_equal_lengths():
    texts = ["a"] * 60
    texts[50], texts[30] = "abcdef", "abc"
    data = Lengths([[9.0] * 40 + [1.0] * 20], [len(text) for text in texts])
    data.text_length = lambda index: len(texts[index])
    items = found(data)
    assert (items[0]["index"], items[1]["index"], len(items)) == (30, 50, 21)


def test_items_that_cannot_be_read():
    data = Lengths([[5, 4, 3]], [1, 1, 1], bad=(0,))
    assert [item["index"] for item in found(data, skip_bad=True)] == [1, 2]
    with pytest.raises(DataError, match="utterance 0 is damaged"):
        found(data)


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin().cos().tanh()  # what recomputation saves


class Network(nn.Module):
    """An encoder that can be frozen, and a head."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.encoder = nn.Sequential(*(Layer(width, width) for _ in range(6)))
        self.head = nn.Linear(width, 1)
        self.encoder_frozen = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def freeze(model: Network) -> None:
    model.encoder_frozen = True
    model.encoder.requires_grad_(False)


SHORT = [{"index": 0, "seconds": 0.01, "targets": 1}]


def run_of(model: nn.Module, items: list | None = None, can_freeze: bool = True) -> PlannedRun:
    """Sequences of 1000 frames for each second."""

    def batch(items: list[dict]) -> dict:
        made = collate(items)
        longest = int(1000 * max(made["seconds"]))
        return {**made, "x": torch.zeros(len(items), longest, model.head.in_features)}

    def step(batches: list[dict]) -> None:
        for each in batches:
            model(each["x"]).sum().backward()

    if items is None:
        items = [{"index": 0, "seconds": 2.0, "targets": 1}]
    states = functools.partial(optim.state_bytes, model)
    checkpoint = functools.partial(memory.checkpoint_layers, model, (Layer,))
    freezing = functools.partial(freeze, model) if can_freeze else None
    return PlannedRun(model, step, items, 9, states, batch, checkpoint, freezing)


CARD = Card("card", 24 << 30, (8, 6))


def test_a_large_batch_is_the_small_one_again_and_again():
    """As `collate` would make it, but for the values of the audio."""

    def collate_audio(items: list[dict]) -> dict:
        numbers = torch.tensor([item["index"] for item in items])
        audio = torch.zeros(len(items), 1 << 15)
        return {**collate(items), "numbers": numbers, "short": numbers / 2, "audio": audio}

    items = found(Lengths([[5, 4, 3]], [7, 7, 7]))
    larger = repeated(collate_audio(items), 3, 7)
    expected = collate_audio([items[i % 3] for i in range(7)])
    assert larger["audio"].is_meta and larger["audio"].shape == expected["audio"].shape
    del larger["audio"], expected["audio"]
    for key in ("numbers", "short"):
        assert torch.equal(larger.pop(key), expected.pop(key))
    assert larger == expected


@pytest.mark.parametrize("words", ["--batch_size 2147483647", "--batch_size 100000"])
def test_a_batch_that_is_far_too_large_takes_no_longer(words, capsys):
    """Utterances of 10 MB as they are, and of 100 MB in the network."""
    planned = run_of(Network(256), [{"index": 0, "seconds": 10.0, "targets": 1}])
    planned = dataclasses.replace(planned, count=10_000_000)
    sizes = []

    def step(batches: list[dict]) -> None:
        sizes.append(len(batches[0]["x"]))
        run_of(planned.model).step(batches)

    planned = dataclasses.replace(planned, step=step)
    args = flags(*words.split(), "--gradient_accumulation_steps", "1")
    assert planned.answer(args, CARD, "torch.float32") == 3
    out = capsys.readouterr().out
    assert f"Dry run: {FIRST} x 10.0 s" in out and "Verdict: does not fit" in out
    size = planned.settings(args).batch_size
    assert f"all {size} need more" in out and re.search(r"^  --batch_size \d+ ", out, re.MULTILINE)
    assert max(sizes) == FIRST and len(sizes) < 60


def flags(*words: str):
    parser = options.Parser("")
    options.add_arguments(parser)
    return parser.parse_args(["--batch_size", "8", "--gradient_accumulation_steps", "2", *words])


def test_settings_by_the_flags():
    few = ("--gradient_accumulation_steps", "1")  # the data have nine utterances
    planned = run_of(Network())
    assert planned.settings(flags(*few)) == PlannedSettings(8, 1, False, "adamw", False)
    changed = planned.settings(flags(*few, "--use_cpu_offload", "--gradient_checkpointing"))
    assert changed == PlannedSettings(8, 1, True, "states", False)
    assert planned.settings(flags("--optimizer", "adamw_8bit")).optimizer == "adamw_8bit"
    model = Network()
    freeze(model)
    assert run_of(model).settings(flags()).frozen
    assert not run_of(model, can_freeze=False).settings(flags()).frozen


@pytest.mark.parametrize(
    ("words", "size", "accumulation"),
    [
        ("--max_batch_seconds 100", 8, 2),
        ("--max_batch_seconds 4.5", 2, 5),
        ("--max_batch_seconds 1", 1, 9),
        ("--max_batch_seconds 7 --batch_size 8 --gradient_accumulation_steps 1", 3, 3),
        ("--batch_size 1000", 9, 1),
        ("--batch_size 2", 2, 2),
        ("--batch_size 4 --gradient_accumulation_steps 50", 4, 3),
    ],
)
def test_a_micro_batch_is_no_larger_than_the_data_and_max_batch_seconds_allow(
    words, size, accumulation
):
    """Nine clips of 2 s."""
    settings = run_of(Network()).settings(flags(*words.split()))
    assert (settings.batch_size, settings.accumulation) == (size, accumulation)


def test_each_setting_needs_less_and_leaves_the_model_as_it_was():
    model = Network()
    model.eval()
    peak = run_of(model).planned(flags(), CARD).training
    given = PlannedSettings(8, 2, False, "adamw", False)
    whole = peak(given)
    for change in (
        {"checkpointing": True},
        {"optimizer": "adamw_8bit"},
        {"optimizer": "states"},
        {"optimizer": "gradients"},
        {"frozen": True},
        {"batch_size": 4, "accumulation": 4},
    ):
        assert peak(PlannedSettings(**{**vars(given), **change})).total < whole.total, change
        assert peak(given) == whole
    assert not model.encoder_frozen
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())


def evaluated(planned: PlannedRun, compares: bool = False) -> PlannedRun:
    """With evaluations of four utterances at most, in which all outputs of the encoder are kept.
    The encoder's weights can have 16 bits on the GPU."""

    def evaluate(batches: list[dict], level: str) -> None:
        with torch.no_grad():
            x = batches[0]["x"]
            kept = [x.new_empty(x.shape, dtype=layer.weight.dtype) for layer in model.encoder]
            assert len(kept) == 6 and level in ("", "gradients", "weights")

    model = planned.model
    evaluation = Evaluation(evaluate, planned.items, 4, planned.collate)
    return dataclasses.replace(
        planned,
        evaluation=evaluation,
        castable=lambda: list(model.encoder.parameters()),
        halves=torch.bfloat16,
        compares=compares,
    )


def test_gradients_that_leave_at_once():
    model = Network(512)
    measures = run_of(model, SHORT).planned(flags(), CARD)
    states = measures.training(PlannedSettings(2, 2, False, "states", False))
    peak = measures.training(PlannedSettings(2, 2, False, "gradients", False))
    weights = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    assert states.parts["gradients"] == pytest.approx(weights, rel=1e-2)
    assert peak.parts["gradients"] == 0
    assert weights + largest < peak.total < weights + 2.5 * largest
    for parameter in model.parameters():
        assert parameter.grad is None and not parameter._post_accumulate_grad_hooks


def test_evaluation_has_states_and_no_gradients():
    planned = evaluated(run_of(Network()))
    assert planned.settings(flags()).eval_batch_size == 4
    measures = planned.planned(flags(), CARD)
    settings = PlannedSettings(1, 2, False, "adamw", False, 4)
    training, evaluation = measures.stages(settings)
    weights = sum(p.nbytes for p in planned.model.parameters())
    assert (training.stage, evaluation.stage) == ("training", "evaluation")
    assert evaluation.parts["gradients"] == 0 and evaluation.utterances == 4
    assert evaluation.parts["optimizer states"] == pytest.approx(2 * weights, abs=64 * 512)
    assert evaluation.parts["activations"] == 6 * 4 * 2000 * 64 * 4
    half = measures.evaluation(PlannedSettings(1, 2, False, "adamw", False, 2))
    assert half.parts["activations"] == evaluation.parts["activations"] // 2
    assert measures.largest(settings) == max(training, evaluation, key=lambda peak: peak.total)


def sharded(planned: PlannedRun, ranks: int, **changes) -> PlannedRun:
    return dataclasses.replace(planned, ranks=ranks, layers=(Layer,), **changes)


def test_shards_in_training_and_evaluation():
    """A rank has its part of weights, gradients and states. In evaluation it has the whole model,
    too, the encoder in 16 bits."""
    planned = evaluated(run_of(Network(512), SHORT))
    given = PlannedSettings(2, 2, True, "adamw", False, 2)
    whole = planned.planned(flags(), CARD).training(given)
    full = sum(p.nbytes for p in planned.model.parameters())
    encoder = sum(p.nbytes for p in planned.model.encoder.parameters())
    before = whole.total
    for ranks in (2, 4, 8):
        measures = sharded(planned, ranks).planned(flags(), CARD)
        settings = dataclasses.replace(given, sharded=True)
        training, evaluation = measures.stages(settings)
        assert training.total < before
        before = training.total
        shards = pytest.approx(full / ranks, rel=0.02)  # the head's one row is not divided
        assert evaluation.parts["weights"] - full + encoder // 2 == shards
        assert training.parts["optimizer states"] == pytest.approx(2 * full / ranks, rel=0.02)
        assert evaluation.parts["optimizer states"] == training.parts["optimizer states"]
        assert measures.training(given) == whole
    assert all(p.grad is None and not p._backward_hooks for p in planned.model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in planned.model.modules())


@pytest.mark.parametrize(
    ("compares", "ranks", "optimizer", "stage"),
    [  # The other model is whole, in fp32: more than 16-bit weights, and than shards of eight.
        (True, 8, "adamw", "the comparison at the end"),
        (True, 2, "adamw", "evaluation"),
        (True, 1, "weights", "the comparison at the end"),
        (True, 1, "gradients", "evaluation"),
        (False, 1, "weights", "evaluation"),
    ],
)
def test_a_comparison_at_the_end_has_a_model_in_fp32(compares, ranks, optimizer, stage):
    planned = sharded(evaluated(run_of(Network(1024)), compares), ranks)
    settings = PlannedSettings(1, 2, False, optimizer, False, 1, sharded=ranks > 1)
    assert planned.planned(flags(), CARD).evaluation(settings).stage == stage


# --- in the loop ----------------------------------------------------------------------------------


def planned(folder, *words: str, data=None, model=None) -> tuple[int, list]:
    """The exit status of a planned run, and what it left in its folder."""
    with pytest.raises(Planned) as leaving:
        small.run(small.make_args(folder, "--max_steps", "3", *words), model=model, data=data)
    return leaving.value.status, list(folder.iterdir())


def test_verify_gpu_plans_on_the_gpu_that_is_there(tmp_path, capsys, monkeypatch):
    import dry_run.cards

    checks = []
    monkeypatch.setattr(dry_run.cards, "card_here", lambda index: CARD)
    verify = lambda args, model, plan=None: checks.append(plan and plan()) or 1  # noqa: E731
    monkeypatch.setattr(preflight, "verify", verify)
    assert planned(tmp_path, "--verify_gpu") == (1, [])
    ((needed, verdict),) = checks
    assert verdict == "fits"
    assert 30 * 2**20 < needed < 2**29  # what must be free beside the CUDA context
    monkeypatch.setattr(dry_run.cards, "card_here", lambda index: None)
    assert planned(tmp_path, "--verify_gpu") == (1, []) and checks[1] is None


REFUSED = [
    ("--dry_run 8PB", "'8PB' is not a GPU"),
    ("--dry_run 2xT5", "'T5' is not a GPU"),
    ("--dry_run 0x8GB", "'0x8GB' is not a GPU"),
    ("--dry_run 8GB --sharded", "--sharded needs several GPUs"),
    ("--verify_gpu --sharded", "--sharded needs several GPUs"),
]
if not torch.cuda.is_available():
    REFUSED.append(("--dry_run", "no GPU here, so name one"))


@pytest.mark.parametrize("words, reason", REFUSED)
def test_what_cannot_be_planned_is_refused_before_the_data_are_read(tmp_path, words, reason):
    with pytest.raises(UsageError, match=reason):
        loop.begin(small.make_args(tmp_path, *words.split()), small.RECIPE)


def test_two_cards_share_an_update(tmp_path, capsys, monkeypatch):
    """13 utterances: each of two cards has 7 at most, of a global batch of 8 utterances 4."""
    words = ("--batch_size", "2", "--gradient_accumulation_steps", "2", "--dry_run")
    runs = []

    class Noted(PlannedRun):
        def answer(self, args, card, dtype) -> int:
            runs.append((self.count, self.settings(args), card.count))
            return super().answer(args, card, dtype)

    batches = []

    def global_batches(*given):
        batches.append(GlobalBatches(*given))
        return batches[-1]

    monkeypatch.setattr("dry_run.PlannedRun", Noted)
    monkeypatch.setattr("common.parts.replay.GlobalBatches", global_batches)
    for card in ("8GB", "2x8GB"):
        assert planned(tmp_path, *words, card) == (0, [])
    assert [(each.global_batch_size, each.per_epoch) for each in batches] == [(4, 4), (8, 2)]
    found = [(count, settings.accumulation, cards) for count, settings, cards in runs]
    assert found == [(13, 2, 1), (7, 2, 2)]
    out = capsys.readouterr().out
    assert out.count("NCCL") == 1
    assert re.search("^Dry run: on each of 2 GPUs .replicated. 2 x ", out, re.MULTILINE)


@pytest.mark.parametrize(
    "place, error",
    [
        # Memory that the plan itself lacks is not a small peak.
        ((small, "compute_loss"), MemoryError("no memory here")),
        ((PlannedRun, "planned"), CannotPlan("torch does not know the shapes")),
    ],
)
def test_a_step_that_cannot_be_planned_is_one_line(tmp_path, monkeypatch, place, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(*place, fail)
    with pytest.raises(RunError, match=f"this run cannot be planned: {error}"):
        small.run(small.make_args(tmp_path, "--max_steps", "3", "--dry_run", "8GB"))
