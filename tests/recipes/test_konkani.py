"""The Konkani recipe's model, loss, decoding and data, against references."""

import argparse

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common import memory
from common.errors import UsageError
from recipes import konkani_conformer as recipe
from speech.corpus import load_corpus
from tests import tiny

CPU = torch.device("cpu")


def moved(items):
    return next(recipe.batches.to_device([recipe.collate(items)], CPU))


def awake(model, seed=3):
    """A model whose residual branches and biases are not near zero, so that a test sees every part."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


@pytest.mark.parametrize("subsampling", [4, 8])
@pytest.mark.parametrize("cmvn", ["global", "utterance"])
def test_padding_changes_nothing(subsampling, cmvn):
    torch.manual_seed(0)
    config = {**tiny.CONFIG, "subsampling": subsampling, "cmvn": cmvn}
    model = awake(recipe.Conformer(config).double().eval())
    items = tiny.make_items(4, seed=5)
    together, _, lengths = model.encode(moved(items))
    for row, item in enumerate(items):
        alone, mask, length = model.encode(moved([item]))
        assert mask is None and length[0] == lengths[row] == alone.shape[1]
        assert torch.allclose(together[row, : lengths[row]], alone[0], atol=1e-10)


@pytest.mark.parametrize("samples", [1, 100, 399, 400, 401, 559, 560, 1040, 1041, 16000, 47_999])
@pytest.mark.parametrize("subsampling", [4, 8])
def test_encoder_frames_predicts_what_the_encoder_makes(samples, subsampling):
    model = recipe.Conformer({**tiny.CONFIG, "subsampling": subsampling}).eval()
    item = {**tiny.make_items(1, dtype=torch.float32)[0], "audio": torch.randn(samples)}
    encoded, _, lengths = model.encode(moved([item]))
    assert encoded.shape[1] == lengths[0] == recipe.encoder_frames(samples, subsampling)


def test_the_decoder_sees_no_future_and_no_other_utterance():
    model = awake(tiny.make_model().eval())
    batch = moved(tiny.make_items(3))
    encoded, mask, _ = model.encode(batch)
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
    half = recipe.rotate(q.half(), angles)
    assert half.dtype == torch.float16


def test_losses_match_a_plain_computation():
    model = awake(tiny.make_model().eval())
    items = tiny.make_items(3)
    batch = moved(items)
    found = recipe.compute_loss(model, batch)
    ctc = attention = 0.0
    for item in items:
        encoded, _, _ = model.encode(moved([item]))
        log_probs = model.ctc_head(encoded[0]).log_softmax(-1).detach()
        ctc += ctc_by_hand(log_probs, item["tokens"].tolist(), model.end)
        logits = model.decode(torch.tensor([[model.end, *item["tokens"].tolist()]]), encoded, None)[0].log_softmax(-1)
        target = F.one_hot(item["labels"], model.end + 1).double() * 0.9 + 0.1 / (model.end + 1)
        attention -= (target * logits).sum().item()
    assert found["ctc"].item() == pytest.approx(ctc, rel=1e-9)
    assert found["attention"].item() == pytest.approx(attention, rel=1e-9)


@torch.no_grad()
def ctc_by_hand(log_probs, tokens, blank):
    """The forward recursion of Graves et al. 2006 over the sequence with blanks between the labels."""
    extended = [blank]
    for token in tokens:
        extended += [token, blank]
    alpha = [float(log_probs[0, extended[0]]), float(log_probs[0, extended[1]])] + [-np.inf] * (len(extended) - 2)
    for t in range(1, len(log_probs)):
        new = []
        for s, label in enumerate(extended):
            paths = [alpha[s]] + ([alpha[s - 1]] if s else [])
            if s > 1 and label != blank and label != extended[s - 2]:
                paths.append(alpha[s - 2])
            new.append(np.logaddexp.reduce(paths) + float(log_probs[t, label]))
        alpha = new
    return -np.logaddexp(alpha[-1], alpha[-2])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_changes_neither_loss_nor_gradient(dropout):
    items = tiny.make_items(3)
    plain, checkpointed = awake(tiny.make_model(dropout)), awake(tiny.make_model(dropout))
    memory.checkpoint_layers(checkpointed, (recipe.EncoderLayer, recipe.DecoderLayer, recipe.Subsampling))
    kept, results = [], []
    for model in (plain, checkpointed):
        torch.manual_seed(1)
        bytes_kept = 0

        def pack(tensor):
            nonlocal bytes_kept
            bytes_kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            terms = recipe.compute_loss(model, moved(items))
        kept.append(bytes_kept)
        loss = sum(terms.values())
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert kept[1] < kept[0] / 2, "nothing was recomputed"


def test_checkpointing_a_model_without_layers_is_an_error():
    with pytest.raises(UsageError, match="--gradient_checkpointing: Linear has no layer"):
        memory.checkpoint_layers(torch.nn.Linear(2, 2), (recipe.EncoderLayer,))


def test_ctc_greedy_merges_repeats_and_drops_blanks():
    model = tiny.make_model()
    paths = torch.tensor([[7, 1, 1, 7, 1, 2, 2, 7], [3, 3, 3, 7, 7, 0, 5, 5]])
    model.ctc_head = torch.nn.Identity()
    assert recipe.ctc_greedy(model, F.one_hot(paths, 8), torch.tensor([8, 5])) == [[1, 1, 2], [3]]


@pytest.mark.parametrize(
    "tokens, samples, fits", [([1, 2, 3], 2320, True), ([1, 1, 2, 3], 2320, False), ([1] * 9, 16000, True)]
)
def test_ctc_feasibility_agrees_with_the_loss(tokens, samples, fits):
    frames = recipe.encoder_frames(samples, 4)
    loss = F.ctc_loss(
        torch.zeros(frames, 1, 8).log_softmax(-1), torch.tensor([tokens]), [frames], [len(tokens)], blank=7
    )
    assert recipe.ctc_fits(samples, tokens, 4) == fits == bool(torch.isfinite(loss))


def item_arguments(**changed):
    base = {"seed": 1, "speed_perturbation": True, "spec_augment": True, "subsampling": 4, "cache_audio": None}
    return argparse.Namespace(**{**base, **changed})


def one_file_corpus(tmp_path, seconds=1.0, text="abc"):
    import soundfile

    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).normal(0, 0.1, int(16000 * seconds)), 16000)
    (tmp_path / "m.json").write_text(f'{{"audio_filepath": "a.wav", "text": "{text}"}}\n' * 40)
    corpus, _ = load_corpus(str(tmp_path / "m.json"), recipe.text.normalise, 0.1, 30)
    return corpus


def test_augmentation_depends_on_seed_epoch_and_utterance_alone(tmp_path):
    corpus = one_file_corpus(tmp_path)
    tokenizer = recipe.text.CharTokenizer(["a", "b", "c"])

    def load(index, epoch, **changed):
        return recipe.load_item(corpus, tokenizer, item_arguments(**changed), True, index, epoch)

    first, again = load(3, 1), load(3, 1)
    for key in ("audio", "time_masks", "frequency_masks"):
        assert torch.equal(first[key], again[key])
    assert not torch.equal(first["time_masks"], load(3, 2)["time_masks"])
    assert not torch.equal(first["time_masks"], load(4, 1)["time_masks"])
    assert not torch.equal(first["time_masks"], load(3, 1, seed=2)["time_masks"])
    lengths = {len(load(index, 0)["audio"]) for index in range(40)}
    assert lengths == {16000, 17778, 14546} or len(lengths) == 3
    planned = recipe.seconds_in_epoch(corpus, item_arguments(), 1)
    assert len(first["audio"]) / 16000 == pytest.approx(planned[3], abs=0.001)


def test_speed_perturbation_never_makes_an_utterance_infeasible(tmp_path):
    corpus = one_file_corpus(tmp_path, seconds=0.3, text="abcabca")  # 7 frames for 7 tokens
    tokenizer = recipe.text.CharTokenizer(["a", "b", "c"])
    for index in range(40):
        item = recipe.load_item(corpus, tokenizer, item_arguments(), True, index, 0)
        assert recipe.ctc_fits(len(item["audio"]), item["tokens"].tolist(), 4)


def test_model_sizes_are_those_of_the_guide():
    millions = []
    for d, encoder, decoder in ((256, 12, 6), (192, 8, 4), (128, 6, 3)):
        config = {
            **tiny.CONFIG,
            "d_model": d,
            "encoder_layers": encoder,
            "decoder_layers": decoder,
            "attention_heads": 4,
            "vocabulary": 200,
        }
        millions.append(sum(p.numel() for p in recipe.Conformer(config).parameters()) / 1e6)
    assert millions[0] == pytest.approx(24.7, abs=2) and 9 < millions[1] < 12 and 3 < millions[2] < 6


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_rescoring_picks_what_the_training_loss_likes_best(seed):
    model = awake(tiny.make_model(seed=seed).eval(), seed)
    model.label_smoothing = 0.0
    item = tiny.make_items(1, seed=seed)[0]
    encoded, _, lengths = model.encode(moved([item]))
    hypotheses = recipe.ctc_prefix_beam(model.ctc_head(encoded[0]).log_softmax(-1).numpy(), 6, model.end)

    def loss(tokens):
        changed = {
            **item,
            "tokens": torch.tensor(tokens, dtype=torch.long),
            "labels": torch.tensor([*tokens, model.end]),
        }
        terms = recipe.compute_loss(model, moved([changed]))
        return sum(recipe.LOSS_WEIGHTS[name] * float(value) for name, value in terms.items())

    expected = min((tokens for tokens, _ in hypotheses), key=loss)
    assert recipe.decode(model, encoded, lengths, "rescore", 6) == [list(expected)]


@torch.no_grad()
@pytest.mark.parametrize("method", ["greedy", "rescore", "beam"])
def test_decoding_does_not_depend_on_the_batch(method):
    model = awake(tiny.make_model().eval())
    items = tiny.make_items(3, seed=2)
    encoded, _, lengths = model.encode(moved(items))
    together = recipe.decode(model, encoded, lengths, method, 3)
    for item, tokens in zip(items, together, strict=True):
        encoded, _, length = model.encode(moved([item]))
        assert recipe.decode(model, encoded, length, method, 3) == [tokens]
        assert all(0 <= token < model.end for token in tokens)
