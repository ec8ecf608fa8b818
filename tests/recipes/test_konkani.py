"""The Konkani recipe's model, loss, decoding and data, against references."""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models import onnx_files
from recipes import konkani_conformer as recipe
from speech.data.splits import Checks, load_corpus
from speech.decoding import recogniser
from speech.decoding.search import ctc_prefix_beam
from speech.signal import nemo_features
from speech.signal.audio import SAMPLE_RATE
from speech.signal.features import valid_mask
from tests import contract
from tests.contract import awake
from tests.recipes import runs

SHAPE = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "attention_heads": 2}
CONFIG = {**SHAPE, "subsampling": 4, "vocabulary": 7}
TOKENIZER = recipe.text.CharTokenizer(["a", "b", "c"])
moved = functools.partial(contract.moved, recipe)


def make_items(count: int, seed: int = 0, dtype=torch.float64) -> list[dict]:
    """Utterances of 0.3 to 0.8 s with 1 to 4 tokens, each of which CTC can align."""
    random = np.random.default_rng(seed)
    items = []
    for number in range(count):
        tokens = random.integers(0, CONFIG["vocabulary"], random.integers(1, 5)).tolist()
        audio = torch.from_numpy(random.normal(0, 0.1, random.integers(4800, 13000))).to(dtype)
        item = {"audio": audio, "tokens": torch.tensor(tokens), "targets": len(tokens)}
        item["labels"] = torch.tensor([*tokens, CONFIG["vocabulary"]])
        items.append({**item, "text": "x", "name": f"item {number}", "index": number})
    return items


def make_model(
    dropout: float = 0.0, dtype=torch.float64, seed: int = 0, **changes
) -> recipe.Conformer:
    torch.manual_seed(seed)
    return recipe.Conformer({**CONFIG, **changes}, dropout).to(dtype)


# --- model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 400, 401, 560, 1040, 1041, 47_999])
@pytest.mark.parametrize("subsampling", [4, 8])
def test_encoder_frames_predicts_what_the_encoder_makes(samples, subsampling):
    model = make_model(dtype=torch.float32, subsampling=subsampling).eval()
    item = {**make_items(1, dtype=torch.float32)[0], "audio": torch.randn(samples)}
    encoded = model.encode(moved([item]))
    assert (
        encoded.frames.shape[1]
        == encoded.lengths[0]
        == recipe.encoder_frames(samples, model.config)
    )


@torch.no_grad()
@pytest.mark.parametrize("subsampling", [4, 8])
def test_an_exports_graph_computes_what_greedy_decoding_reads_and_ends_with_blanks(subsampling):
    model = awake(make_model(subsampling=subsampling).eval())
    items = make_items(4, seed=5)
    items[2]["audio"] = items[2]["audio"][:500]  # less than an encoder frame
    batch = moved(items)
    lengths = nemo_features.frames(batch["audio_lengths"])
    features = model.log_mel(batch["audio"], batch["audio_lengths"], int(lengths.max()))
    padding = ~valid_mask(lengths, features.shape[1])[:, :, None]
    features = features.masked_fill(padding, -23.0)  # sherpa-onnx's padding
    together = onnx_files.CtcGraph(model)(features.transpose(1, 2), lengths)
    assert together.shape[1] == -(int(lengths.max()) // -subsampling)  # onnx-asr reads so many
    for item, length, row in zip(items, lengths.tolist(), together, strict=True):
        encoded = model.encode(moved([item])).frames[0]
        expected = model.ctc_head(encoded).log_softmax(-1)
        assert len(expected) == max(1, length // subsampling)  # sherpa-onnx reads so many
        assert torch.allclose(row[: len(expected)], expected, atol=1e-10)
        assert (row[len(expected) :].argmax(-1) == model.eos).all()


def test_the_decoder_sees_no_future_and_no_other_utterance():
    model = awake(make_model().eval())
    encoded, _, mask, _ = model.encode(moved(make_items(3)))
    tokens = torch.randint(0, 7, (3, 6))
    logits = model.decode(tokens, encoded, mask)
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 7
    assert torch.allclose(model.decode(changed, encoded, mask)[:, :4], logits[:, :4], atol=1e-12)
    assert not torch.allclose(model.decode(changed, encoded, mask)[:, 4:], logits[:, 4:])


def test_rotary_attention_depends_on_distances_only():
    angles = recipe.rotary_angles(20, 8, torch.zeros(1))
    q, k = torch.randn(8).expand(1, 1, 20, 8), torch.randn(8).expand(1, 1, 20, 8)
    scores = recipe.rotate(q, angles) @ recipe.rotate(k, angles).transpose(-1, -2)
    for offset in (0, 1, 7):
        diagonal = scores[0, 0].diagonal(offset)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4)
    assert recipe.rotate(q.half(), angles).dtype == torch.float16


def test_model_sizes_are_those_of_the_guide():
    millions = []
    for d, encoder, decoder in ((256, 12, 6), (192, 8, 4), (128, 6, 3)):
        layers = {"encoder_layers": encoder, "decoder_layers": decoder, "attention_heads": 4}
        model = make_model(dtype=torch.float32, vocabulary=200, d_model=d, **layers)
        millions.append(sum(p.numel() for p in model.parameters()) / 1e6)
    assert millions[0] == pytest.approx(24.7, abs=2)
    assert 9 < millions[1] < 12 and 3 < millions[2] < 6


# --- loss -----------------------------------------------------------------------------------------


def test_losses_match_a_plain_computation():
    model = awake(make_model().eval())
    items = make_items(3)
    losses = recipe.compute_loss(model, moved(items))
    lower_half = copy.deepcopy(model)
    del lower_half.encoder[1]
    ctc = middle = attention = 0.0
    for item in items:
        encoded = model.encode(moved([item])).frames
        log_probs = model.ctc_head(encoded[0]).log_softmax(-1)
        ctc += ctc_by_hand(log_probs, item["tokens"].tolist(), model.eos)
        log_probs = model.ctc_head(lower_half.encode(moved([item])).frames[0]).log_softmax(-1)
        middle += ctc_by_hand(log_probs, item["tokens"].tolist(), model.eos)
        logits = model.decode(torch.tensor([[model.eos, *item["tokens"].tolist()]]), encoded, None)[
            0
        ].log_softmax(-1)
        target = F.one_hot(item["labels"], model.eos + 1).double() * 0.9 + 0.1 / (model.eos + 1)
        attention -= (target * logits).sum().item()
    assert losses["ctc"].item() == pytest.approx(ctc, rel=1e-9)
    assert losses["middle_ctc"].item() == pytest.approx(middle, rel=1e-9)
    assert losses["attention"].item() == pytest.approx(attention, rel=1e-9)


@torch.no_grad()
def ctc_by_hand(log_probs, tokens, blank):
    """The forward recursion of Graves et al. 2006 over the sequence with blanks between the
    labels."""
    extended = [blank]
    for token in tokens:
        extended += [token, blank]
    alpha = [float(log_probs[0, extended[0]]), float(log_probs[0, extended[1]])] + [-np.inf] * (
        len(extended) - 2
    )
    for t in range(1, len(log_probs)):
        new = []
        for s, label in enumerate(extended):
            paths = [alpha[s]] + ([alpha[s - 1]] if s else [])
            if s > 1 and label != blank and label != extended[s - 2]:
                paths.append(alpha[s - 2])
            new.append(np.logaddexp.reduce(paths) + float(log_probs[t, label]))
        alpha = new
    return -np.logaddexp(alpha[-1], alpha[-2])


# --- decoding -------------------------------------------------------------------------------------


def test_ctc_greedy_merges_repeats_and_drops_blanks():
    model = make_model()
    paths = torch.tensor([[7, 1, 1, 7, 1, 2, 2, 7], [3, 3, 3, 7, 7, 0, 5, 5]])
    model.ctc_head = torch.nn.Identity()
    encoded = recipe.Encoded(F.one_hot(paths, 8), None, None, torch.tensor([8, 5]))
    assert recipe.ctc_greedy(model, encoded) == [[1, 1, 2], [3]]


def how(method: str, beam_size: int) -> recogniser.DecodingOptions:
    return recogniser.DecodingOptions(decoding=method, beam_size=beam_size)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_rescoring_picks_what_the_weighted_terms_like_best(seed):
    model = awake(make_model(seed=seed).eval(), seed)
    model.label_smoothing = 0.0
    item = make_items(1, seed=seed)[0]
    encoded = model.encode(moved([item]))
    log_probs = model.ctc_head(encoded.frames[0]).log_softmax(-1)
    hypotheses = ctc_prefix_beam(log_probs.numpy(), 6, model.eos)

    def loss(hypothesis):
        tokens, ctc = hypothesis  # of the paths that the beam has kept
        labels = torch.tensor([*tokens, model.eos])
        changed = {**item, "tokens": torch.tensor(tokens, dtype=torch.long), "labels": labels}
        terms = {**recipe.compute_loss(model, moved([changed])), "ctc": -ctc}
        weights = recipe.SEARCH_WEIGHTS.items()
        return sum(weight * float(terms[name]) for name, weight in weights)

    expected, _ = min(hypotheses, key=loss)
    assert recipe.decode(model, encoded, how("rescore", 6), None) == [list(expected)]


@torch.no_grad()
@pytest.mark.parametrize("method", ["greedy", "rescore", "beam"])
def test_decoding_does_not_depend_on_the_batch(method):
    model = awake(make_model().eval())
    items = make_items(3, seed=2)
    together = recipe.decode(model, model.encode(moved(items)), how(method, 3), None)
    for item, tokens in zip(items, together, strict=True):
        alone = recipe.decode(model, model.encode(moved([item])), how(method, 3), None)
        assert alone == [tokens]
        assert all(0 <= token < model.eos for token in tokens)


# --- data -----------------------------------------------------------------------------------------


@pytest.fixture
def utterances(tmp_path, wav, json_lines):
    """utterances(*flags, seconds, text, training): forty times the same recording, as the recipe
    reads it."""

    def make(
        *flags: str, seconds: float = 1.0, text: str = "abc", training: bool = True
    ) -> recipe.Utterances:
        wav(tmp_path / "a.wav", seconds)
        manifest = json_lines(tmp_path / "m.json", [{"audio_filepath": "a.wav", "text": text}] * 40)
        args = runs.parse(recipe, "--train_manifest", manifest, *flags)
        recipe.resolve(args)
        corpus, _ = load_corpus(manifest, recipe.text.normalise, Checks())
        return recipe.Utterances(args, corpus, TOKENIZER, CONFIG, training)

    return make


def test_an_evaluation_set_and_a_set_without_augmentation_are_read_as_they_are(utterances):
    for data in (
        utterances(training=False),
        utterances("--no_spec_augment", "--no_speed_perturbation", "--no_wave_augment"),
    ):
        items = [data.item(index, 1) for index in range(10)]
        assert {len(item["audio"]) for item in items} == {16_000} and "time_masks" not in items[0]
        assert (data.seconds(1) == 1.0).all() and len(data) == 40


def test_only_the_share_that_the_loop_asks_for_is_augmented(utterances):
    plain, data = utterances(training=False), utterances()
    for share in (0.0, 0.5):
        data.augmented_share = share
        same = data.seconds(1) == 1.0
        for index in range(40):
            item = data.item(index, 1)
            is_plain = torch.equal(item["audio"], plain.item(index, 1)["audio"])
            assert is_plain == (not item["time_masks"].any()) == (not data.augmented(1)[index])
            assert len(item["audio"]) / SAMPLE_RATE == pytest.approx(
                data.seconds(1)[index], abs=1e-3
            )
        assert 0.3 < same.mean() < 0.8 or (not share and same.all())


def test_a_few_utterances_are_pauses_without_a_word(utterances):
    data = utterances("--no_speed_perturbation")
    items = [data.item(index, epoch) for epoch in range(3) for index in range(40)]
    silent = [item for item in items if not len(item["tokens"])]
    assert 0 < len(silent) < 15
    assert all(item["labels"].tolist() == [TOKENIZER.size] for item in silent)
    batch = moved(silent[:2])
    torch.manual_seed(0)
    terms = recipe.compute_loss(recipe.Conformer(CONFIG), batch)
    assert all(term.isfinite() and term > 0 for term in terms.values())


def test_speed_perturbation_never_makes_an_utterance_infeasible(utterances):
    data = utterances(seconds=0.3, text="abcabca")  # 7 frames for 7 tokens
    assert (data.speeds(0) > 1).any()
    for index in range(40):
        item = data.item(index, 0)
        assert item["targets"] == len(item["tokens"])
