"""Plans against the memory of real steps: fp32 steps of every recipe on the CPU, whose storages are
counted, and optimizers."""

import copy
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import layers, memory, optim
from common.device import Setup
from common.engine import run_global_batch
from common.parts import offload
from dry_run import fake_tensors, plan
from models.parakeet import settings as parakeet
from models.wav2vec2 import settings as wav2vec2
from models.wav2vec2.model import Wav2Vec2
from models.whisper import formats as whisper
from models.whisper.model import LAYERS, Whisper
from models.xtts import codec
from models.xtts import formats as xtts
from models.xtts import frozen as xtts_frozen
from models.xtts.model import CHECKPOINTED as XTTS_LAYERS
from recipes import (
    konkani_conformer,
    parakeet_tdt,
    template,
    wav2vec2_ctc,
    whisper_morse,
    whisper_vietnamese,
    xtts_amharic,
)
from speech.signal.audio import SAMPLE_RATE
from tests import small

CLIPS, TOKENS, VOCABULARY = 2, 24, 40
TOLERANCE = 0.005


class RealStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operators return, and of those that are added, until
    they are freed."""

    def __init__(self):
        super().__init__()
        self.known: dict[int, weakref.ref] = {}
        self.now = self.peak = 0

    def add(self, tensors) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            size = -(-storage.nbytes() // fake_tensors.ROUNDING) * fake_tensors.ROUNDING
            reference = self.known.get(key)
            is_new = reference is None or reference() is not storage  # an address is used again
            if size and is_new:
                self.known[key] = weakref.ref(storage, functools.partial(self.freed, key, size))
                self.now += size
                self.peak = max(self.peak, self.now)

    def freed(self, key: int, size: int, reference: weakref.ref) -> None:
        self.now -= size
        if self.known.get(key) is reference:
            del self.known[key]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor))
        return results


@dataclass(frozen=True)
class Case:
    model: torch.nn.Module
    batch: dict
    compute_loss: Callable
    loss_weights: dict[str, float]
    checkpointed: tuple[type, ...]
    frozen: tuple[torch.nn.Module, ...] = ()


def items(rate: int = SAMPLE_RATE, seconds: float = 2.0, **others) -> list[dict]:
    """Utterances of noise, each shorter than the one before."""
    random, made = torch.Generator().manual_seed(0), []
    for number in range(CLIPS):
        audio = torch.randn(int(seconds * rate * (1 - 0.2 * number)), generator=random) * 0.1
        tokens = torch.arange(TOKENS - 5 * number) % (VOCABULARY - 3) + 1
        made.append(
            {
                "audio": audio,
                "tokens": tokens,
                "targets": len(tokens),
                "labels": torch.cat([tokens[1:], tokens[:2]]),
                "ctc_tokens": tokens,
                "text": "",
                "heard": len(audio),
                "name": f"{number}",
                "index": number,
                **others,
            }
        )
    return made


def konkani() -> Case:
    recipe = konkani_conformer
    config = {**recipe.DEFAULTS, "vocabulary": VOCABULARY}
    config |= {"d_model": 96, "encoder_layers": 2, "decoder_layers": 2}
    masks = {"frequency_masks": torch.zeros(2, 2), "time_masks": torch.zeros(5, 2)}
    made = recipe.collate(items(**masks))
    model = recipe.Conformer(config)
    return Case(model, made, recipe.compute_loss, recipe.LOSS_WEIGHTS, recipe.CHECKPOINTED)


def parakeet_case() -> Case:
    config = parakeet.make_config(
        96, 2, 4, (64, 2), VOCABULARY, num_mel_bins=80, channels=32, subsampling=4, ctc=True
    )
    weights = {"tdt": 0.7, "ctc": 0.3}
    factors = dict.fromkeys(weights, 0.1)
    counts = dict.fromkeys(weights, 1)
    made = parakeet_tdt.collate(items(plain=False, factors=factors, counts=counts))
    model = parakeet_tdt.Parakeet(config, 0.02, 0.1, 0.1)
    return Case(model, made, parakeet_tdt.compute_loss, weights, parakeet_tdt.CHECKPOINTED)


def wav2vec2_case(norm: str, is_trained: bool) -> Case:
    config = wav2vec2.make_config(
        128, 2, 4, conv_dim=[8] * 7, num_conv_pos_embeddings=32, vocabulary=VOCABULARY
    )
    masks = {"time_masks": torch.arange(99) % 3 == 0, "channel_masks": torch.arange(128) % 5 == 0}
    made = wav2vec2_ctc.collate(items(**masks, layers=torch.tensor([True, True])))
    made["layers"] = torch.tensor([[True, False], [True, True]])
    model = Wav2Vec2({**config, "feat_extract_norm": norm}, 0.1)
    model.feature_extractor.requires_grad_(is_trained)
    recipe = wav2vec2_ctc
    return Case(model, made, recipe.compute_loss, recipe.LOSS_WEIGHTS, recipe.CHECKPOINTED)


def whisper_model() -> Whisper:
    return Whisper(whisper.make_config(128, (2, 2), 4, vocabulary=4000), 0.1, 0.1, VOCABULARY)


def morse() -> Case:
    made = whisper_morse.collate(items(alignment=torch.arange(80) % VOCABULARY))
    weights = {"attention": 0.7, "alignment": 0.3}
    return Case(whisper_model(), made, whisper_morse.compute_loss, weights, LAYERS)


def vietnamese(frozen: bool = False) -> Case:
    made = whisper_vietnamese.collate(items(language="vi"))
    model = whisper_model()
    if frozen:
        model.freeze_encoder()
    weights = {"attention": 0.7, "ctc": 0.3}
    return Case(model, made, whisper_vietnamese.compute_loss, weights, LAYERS)


def xtts_case() -> Case:
    recipe, torch_items = xtts_amharic, items(codec.SAMPLE_RATE)
    config = xtts.make_config(
        128, 3, 2, 450, 64, latents=8, perceiver_heads=2, code_dim=32, dvae_hidden=32
    )
    frozen = xtts_frozen.make_frozen(config)
    for item in torch_items:
        codes = codec.code_count(len(item["audio"]))
        item |= {
            "slice": item["audio"][: codec.SAMPLE_RATE],
            "codes": codes,
            "heard": (0, codes // 2),
            "language": "am",
        }
    made, loss = recipe.collate(torch_items), functools.partial(recipe.compute_loss, frozen=frozen)
    # The DVAE's decoder stays on the host, as in a training.
    parts = frozen.dvae_mel, frozen.conditioning_mel, frozen.dvae.encoder, frozen.dvae.codebook
    return Case(recipe.GPT(config, 0.1), made, loss, recipe.LOSS_WEIGHTS, XTTS_LAYERS, parts)


def template_case() -> Case:
    recipe = template
    info = recipe.ModelInfo(192, 4, [chr(ord("a") + number) for number in range(VOCABULARY)])
    made = recipe.collate(items())
    layers = (recipe.Layer,)
    return Case(recipe.Network(info, 0.1), made, recipe.compute_loss, recipe.LOSS_WEIGHTS, layers)


CASES = {
    "template": template_case, "konkani": konkani, "parakeet": parakeet_case, "morse": morse, "vietnamese": vietnamese,
    "vietnamese, frozen encoder": functools.partial(vietnamese, frozen=True), "xtts": xtts_case,
    "wav2vec2": functools.partial(wav2vec2_case, "layer", False),
    "wav2vec2, trained extractor": functools.partial(wav2vec2_case, "group", True),
}  # fmt: skip


def make(name: str, checkpointing: bool) -> Case:
    torch.manual_seed(0)
    case = CASES[name]()
    case.model.train()
    if checkpointing:
        memory.checkpoint_layers(case.model, case.checkpointed)
    return case


def run(case: Case, batches: list[dict]) -> None:
    outcome = run_global_batch(
        case.model, batches, case.batch["counts"], case.compute_loss, case.loss_weights, Setup()
    )
    assert not outcome.failed


def tensors(*holders) -> list[torch.Tensor]:
    """Parameters and buffers of modules, and the tensors of batches."""
    kept = []
    for holder in holders:
        if isinstance(holder, dict):
            kept += [value for value in holder.values() if isinstance(value, torch.Tensor)]
        else:
            kept += [*holder.parameters(), *holder.buffers()]
    return kept


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch):
    """Small inputs take the ways of large ones. Without oneDNN, LSTM is made of operators that a
    plan sees, too."""
    monkeypatch.setattr(layers, "SMALL", 1 << 12)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture(autouse=True)
def ctc_gets_numbers(monkeypatch):
    """Lengths that are tensors are a dozen waits for the device, and no modes, such as torch's
    counter of operations, take them with a GPU."""
    loss = F.ctc_loss

    def checked(log_probs, targets, frames, lengths, *others, **named) -> torch.Tensor:
        assert {type(number) for number in (*frames, *lengths)} == {int}
        return loss(log_probs, targets, frames, lengths, *others, **named)

    monkeypatch.setattr(F, "ctc_loss", checked)


@pytest.mark.parametrize("checkpointing, micro_batches", [(False, 1), (True, 2)])
@pytest.mark.parametrize("name", CASES)
def test_a_recipe(name, checkpointing, micro_batches):
    case = make(name, checkpointing)
    batches = [copy.deepcopy(case.batch) for _ in range(micro_batches)]
    with RealStorages() as real:
        real.add(tensors(case.model, *case.frozen, *batches))
        run(case, batches)
    case = make(name, checkpointing)
    planned = plan.Plan(None, case.model, case.compute_loss)
    peak = planned.measure(lambda batches: run(case, batches), [case.batch] * micro_batches)
    assert real.peak > 1.5 * peak.parts["weights"]  # activations dominate
    assert peak.total - peak.kernels == pytest.approx(real.peak, rel=TOLERANCE)


def evaluation_of(name: str, case: Case) -> Callable:
    """The `evaluate` of a recipe."""
    tokenizer = types.SimpleNamespace(decode=lambda tokens: "text")
    if name == "konkani":
        return functools.partial(konkani_conformer.evaluate, tokenizer)
    if name == "wav2vec2":
        tokenizer.delimiters = tokenizer.spaces = set()
        return functools.partial(wav2vec2_ctc.evaluate, tokenizer)
    if name == "parakeet":
        return functools.partial(parakeet_tdt.evaluate, tokenizer, case.loss_weights, [])
    frozen = case.compute_loss.keywords["frozen"]
    return functools.partial(xtts_amharic.evaluate, frozen, ["am"])


@pytest.mark.parametrize("name", ["konkani", "parakeet", "wav2vec2", "xtts"])
def test_an_evaluation(name):
    """Searches end after other numbers of steps, of which each keeps little."""

    def evaluate(batches: list[dict]) -> None:
        with torch.no_grad():
            evaluation_of(name, case)(case.model.eval(), batches)

    case = make(name, False)
    batch = copy.deepcopy(case.batch)
    with RealStorages() as real:
        real.add(tensors(case.model, *case.frozen, batch))
        evaluate([batch])
    case = make(name, False)
    planned = plan.Plan(None, case.model, case.compute_loss)
    peak = planned.measure(evaluate, [case.batch])
    assert peak.total - peak.kernels == pytest.approx(real.peak, rel=TOLERANCE)


def two_layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    first = torch.nn.Linear(512, 1024)
    return torch.nn.Sequential(first, torch.nn.GELU(), torch.nn.Linear(1024, 512))


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict]) -> None:
    for batch in batches:
        model(batch["x"]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("rows", [8, 4096])
def test_an_optimizer(rows):
    batch, model = {"x": torch.randn(rows, 512)}, two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with RealStorages() as real:
        real.add(tensors(model, batch))
        for _ in range(2):
            update(model, optimizer, [batch])
    model = two_layers()
    planned = plan.Plan(None, model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    peak = planned.measure(functools.partial(update, model, optimizer), [batch])
    assert peak.phase == "backward"  # the fused kernel allocates nothing
    states = pytest.approx(2 * peak.parts["weights"], abs=8 * fake_tensors.ROUNDING)
    assert peak.parts["optimizer states"] == states
    assert peak.total == pytest.approx(real.peak, rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "states"])
def test_states(kind):
    """`state_bytes` against the states that are made, without step numbers and bitsandbytes' two
    shared tables."""
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    linears = [torch.nn.Linear(*sizes) for sizes in ((96, 64), (64, 70), (70, 3))]
    model = torch.nn.Sequential(torch.nn.Embedding(100, 96), *linears)
    model[1].bias.requires_grad_(False)
    on_host = kind == "states"
    if on_host:
        model.to("meta")  # a device that is not the host
    placed = offload.begin(kind, model, (), None) if on_host else None
    settings = {"kind": "adamw" if on_host else kind, "on_host": placed}
    states = small.optimizer_of(model, 1e-3, **settings).state.values()
    total = 0
    for state in states:
        for name, value in state.items():
            is_average = isinstance(value, torch.Tensor) and name not in ("step", "qmap1", "qmap2")
            if is_average and value.is_meta == on_host:
                total += value.nbytes
    assert total == optim.state_bytes(model, kind)
    assert (optim.state_bytes(model, kind) == 0) == on_host
