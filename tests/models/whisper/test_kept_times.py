"""The measure of what fine-tuning unlearns, against plain loops; and its table."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from common.batches import pad, to_device
from common.device import Setup
from common.errors import DataError
from models.whisper import formats, kept_times
from models.whisper.kept_times import Times
from models.whisper.model import Whisper

EOS, TIMES = 20, 30  # ids; those of time tokens from TIMES on
PROMPT = [21, 22, 23]
TOKENIZER = SimpleNamespace(eos=EOS, timestamp_begin=TIMES)
# Tokens after the prompt: three utterances; two and the start of a third, which is cut; one.
TEXTS = [[30, 1, 2, 33, 33, 3, 36, 38, 4, 5, 40], [31, 6, 34, 35, 7, 8, 37, 39], [30, 9, 44]]
BEFORE = [[], [24, 30, 1, 32], [24, 5]]


def collate(items: list[dict]) -> dict:
    batch = {"names": [item["name"] for item in items], "counts": {}}
    for key in ("audio", "tokens", "labels"):
        batch[key], batch[f"{key}_lengths"] = pad([item[key] for item in items])
    batch["unscored_lengths"] = torch.tensor([item["unscored"] for item in items])
    return batch


def make_items() -> list[dict]:
    items = []
    for number, (before, text) in enumerate(zip(BEFORE, TEXTS, strict=True)):
        tokens = [*before, *PROMPT, *text]
        items.append(
            {
                "name": str(number),
                "audio": torch.sin(torch.arange(3200.0 * (number + 2)) * 0.1 * (number + 1)),
                "tokens": torch.tensor(tokens),
                "labels": torch.tensor([*tokens[1:], EOS]),
                "unscored": len(before),
            }
        )
    return items


@pytest.fixture(scope="module")
def model() -> Whisper:
    torch.manual_seed(0)
    config = formats.make_config(16, (1, 1), 2, vocabulary=50)
    model = Whisper({**config, "max_source_positions": 150}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def test_it_is_what_loops_find(model):
    ends, losses = [], []
    for item in make_items():
        item["audio"] = F.pad(
            item["audio"], (0, model.longest - len(item["audio"]))
        )  # as others do
        (batch,) = to_device([collate([item])], torch.device("cpu"))
        encoded, mask = model.encode(batch)
        assert mask is None
        logits = model.logits(model.decoder(batch["tokens"], encoded, mask))[0]
        chances = logits.log_softmax(-1)
        labels = item["labels"].tolist()
        for place in range(item["unscored"], len(labels)):
            if labels[place] >= TIMES:
                losses.append(-float(chances[place, labels[place]]))
                is_inner = labels[place + 1] >= TIMES and labels[place + 2] != EOS
                if is_inner:  # an utterance ends here that a whole one follows
                    now, then = chances[place, EOS].exp(), chances[place + 1, EOS].exp()
                    ends.append(float(now + (1 - now) * then))
    assert len(ends) == 3 and len(losses) == 6 + 5 + 2
    for size in (1, 3):
        items = make_items()
        batches = [collate(items[first : first + size]) for first in range(0, 3, size)]
        found = kept_times.measure(model, TOKENIZER, batches)
        assert found.windows == 3
        assert found.end == pytest.approx(sum(ends) / 3, rel=1e-4)
        assert found.most == pytest.approx(max(ends), rel=1e-4)
        assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert kept_times.measure(model, TOKENIZER, []) is None and not model.pad_to_longest


def test_packs_of_several_utterances_are_taken():
    class Data:
        packs = SimpleNamespace(
            layout=lambda epoch: SimpleNamespace(
                place=torch.arange(200).numpy(),
                stop=(torch.arange(200) + (torch.arange(200) % 2)).numpy(),
                timed=torch.ones(200, dtype=torch.bool).numpy(),
            )
        )

        def item(self, index: int, epoch: int) -> int:
            if index == unreadable:
                raise DataError("cannot be read")
            return index

    unreadable = None
    taken = list(kept_times.batches(Data(), list))
    assert all(index % 2 for batch in taken for index in batch)
    assert sum(map(len, taken)) == kept_times.PACKS == 24
    unreadable = taken[0][0]
    assert sum(map(len, kept_times.batches(Data(), list))) == 23


def test_the_table_and_its_warning():
    before = Times(0.02, 0.36, 2.84, 24)
    light = kept_times.report(Times(0.008, 0.14, 3.46, 24), before, "val")
    assert light.count("\n") == 3 and "2.0%     0.8%" in light
    assert not kept_times.warning(Times(0.008, 0.14, 3.46, 24), before)
    heavy = kept_times.warning(Times(0.157, 0.48, 4.83, 24), before)
    assert "read on after a sentence" in heavy and "--timestamp_share" in heavy
    forgotten = kept_times.warning(Times(0.01, 0.02, 4.0, 24), before)
    assert "write times" in forgotten
    assert "before" not in kept_times.report(before, None, "test")
    assert not kept_times.warning(before, None)
    assert kept_times.from_list(kept_times.to_list(before)) == before
    assert kept_times.from_list([]) is None and kept_times.to_list(None) == []


def test_it_is_measured_once_before_training_in_the_types_of_the_device(model):
    run = SimpleNamespace(initial=None, setup=Setup(dtype=torch.bfloat16))
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    found = Times(0.01, 0.1, 3.0, 24)
    types = {}

    def measure(used: Whisper) -> Times:
        assert not used.training and torch.is_autocast_enabled("cpu")
        types.update({name: p.dtype for name, p in used.named_parameters()})
        return found

    model.train()
    assert kept_times.at_start(model, run, None, measure) == kept_times.to_list(found)
    assert model.training
    model.eval()
    for name, parameter in model.named_parameters():
        kept = "norm" in name or "embed_positions" in name  # added to activations in fp32
        assert types[name] == (torch.float32 if kept else torch.bfloat16), name
        place, values = before[name]
        assert parameter.data_ptr() == place and torch.equal(parameter, values)
    assert kept_times.at_start(model, run, [1.0], pytest.fail) == [1.0]  # of a resumed run
    run.initial = "weights that the loop loads"
    assert kept_times.at_start(model, run, None, pytest.fail) == []
