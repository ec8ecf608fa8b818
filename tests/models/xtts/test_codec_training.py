"""The DVAE's training: k-means against brute force, exact losses and gradients, crops, and the
start from the data."""

import itertools
import math

import numpy as np
import pytest
import soundfile
import torch

from common.device import Setup
from common.engine import run_global_batch
from models.xtts import codec_training
from models.xtts.codec import SAMPLE_RATE, SAMPLES_PER_CODE, Mel
from models.xtts.codec_training import CROP, FRAMES, LOSS_WEIGHTS, Coder, Crops, fit, kmeans
from speech.data.columns import Corpus
from speech.data.splits import Checks, load_corpus, some_items
from speech.writing.text import normalise

CONFIG = {"mel_channels": 80, "dvae_hidden": 8, "codes": 12, "code_dim": 4}
SECONDS = (0.4, 3.0, 1.0, 1.2, 2.0, 0.9)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """Six clips of noise; those at 0 and 5 are shorter than a crop."""
    folder, random, rows = (
        tmp_path_factory.mktemp("clips"),
        np.random.default_rng(0),
        ["audio_file|text"],
    )
    for number, seconds in enumerate(SECONDS):
        samples = 0.1 * random.normal(size=round(seconds * SAMPLE_RATE))
        samples *= 1 + np.sin(np.arange(len(samples)) / (300 + 400 * number))
        soundfile.write(folder / f"{number}.wav", samples.clip(-1, 1), SAMPLE_RATE)
        rows.append(f"{number}.wav|a")
    (folder / "m.csv").write_text("\n".join(rows), encoding="utf-8")
    return load_corpus(str(folder / "m.csv"), normalise, Checks())[0]


def make_crops(corpus: Corpus, seed: int = 1, training: bool = True) -> Crops:
    return Crops(corpus, seed, training)


@torch.no_grad()
def make_coder(items: list[dict], quantised: bool = True) -> Coder:
    """A DVAE whose codes are near vectors of the crops, so that all are used."""
    torch.manual_seed(0)
    audio = torch.stack([item["audio"] for item in items])
    coder = Coder(CONFIG, quantised).to(audio.dtype)
    coder.mel.mel_stats.fill_(4.0)
    vectors = coder.dvae.encode(coder.features(audio)).flatten(0, 1)[::8]
    coder.dvae.codebook.embed.copy_(1.1 * vectors.t())
    return coder


def make_items(corpus: Corpus, dtype=torch.float64) -> list[dict]:
    items = [make_crops(corpus).item(index, 0) for index in range(4)]
    return [{**item, "audio": item["audio"].to(dtype)} for item in items]


# --- k-means --------------------------------------------------------------------------------------


def brute_force(vectors: np.ndarray, count: int, generator: torch.Generator) -> np.ndarray:
    """Lloyd's algorithm, a vector and a centre at a time."""
    repeated = np.concatenate([vectors] * math.ceil(count / len(vectors)))
    centres = repeated[torch.randperm(len(repeated), generator=generator)[:count].numpy()]
    for _ in range(codec_training.ROUNDS):
        codes = [
            min(range(count), key=lambda k: ((vector - centres[k]) ** 2).sum())
            for vector in vectors
        ]
        drawn = vectors[torch.randint(len(vectors), (count,), generator=generator).numpy()]
        members = [
            [vector for vector, code in zip(vectors, codes, strict=True) if code == k]
            for k in range(count)
        ]
        centres = np.stack(
            [np.mean(own, axis=0) if own else drawn[k] for k, own in enumerate(members)]
        )
    return centres


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inertia(vectors: torch.Tensor, centres: torch.Tensor) -> float:
    return torch.cdist(vectors, centres).square().amin(1).sum().item()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("vectors", "count"), [(60, 5), (30, 12), (3, 8)])
def test_kmeans_is_that_of_brute_force(seed, vectors, count):
    drawn = torch.randn(vectors, 3, generator=seeded(9 + seed)).round(decimals=1)
    centres = kmeans(drawn, count, seeded(seed))
    assert centres.shape == (count, 3)
    assert (
        np.abs(centres.numpy() - brute_force(drawn.double().numpy(), count, seeded(seed))).max()
        < 1e-5
    )


def test_every_round_of_kmeans_lowers_the_inertia(monkeypatch):
    vectors, values = torch.randn(300, 4, generator=seeded(3)), []
    for rounds in range(9):
        monkeypatch.setattr(codec_training, "ROUNDS", rounds)
        values.append(inertia(vectors, kmeans(vectors, 10, seeded(0))))
    assert all(later <= earlier + 1e-3 for earlier, later in itertools.pairwise(values))
    assert values[-1] < 0.9 * values[0]


def test_centres_without_vectors_move():
    vectors = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]).repeat_interleave(10, dim=0)
    starts = [
        vectors[torch.randperm(30, generator=seeded(seed))[:3]].unique(dim=0) for seed in range(10)
    ]
    assert min(map(len, starts)) < 3, "no start has two equal centres"
    for seed in range(10):
        assert inertia(vectors, kmeans(vectors, 3, seeded(seed))) == 0


def test_fewer_vectors_than_centres():
    vectors = torch.randn(5, 4, generator=seeded(1))
    centres = kmeans(vectors, 17, seeded(0))
    assert (
        centres.shape == (17, 4)
        and bool(centres.isfinite().all())
        and inertia(vectors, centres) < 1e-9
    )
    assert (torch.cdist(centres, vectors).amin(1) < 1e-6).all(), (
        "a centre is not one of the vectors"
    )


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantised", [True, False])
def test_however_a_window_is_cut_its_gradient_is_the_same(corpus, quantised):
    items, results = make_items(corpus), []
    coder = make_coder(items, quantised).train()
    for sizes in ([4], [2, 2], [1, 1, 1, 1], [3, 1]):
        rest = iter(items)
        batches = [codec_training.collate([next(rest) for _ in range(size)]) for size in sizes]
        assert [batch["counts"] for batch in batches] == [
            dict.fromkeys(LOSS_WEIGHTS, size) for size in sizes
        ]
        coder.zero_grad()
        totals = dict.fromkeys(LOSS_WEIGHTS, 4)
        outcome = run_global_batch(
            coder, batches, totals, codec_training.compute_loss, LOSS_WEIGHTS, Setup(), None
        )
        gradients = {name: p.grad.clone() for name, p in coder.named_parameters()}
        results.append((outcome.sums, gradients))
    (sums, whole), *others = results
    assert ("dvae.codebook.embed" in whole) == quantised and all(
        g.abs().max() > 0 for g in whole.values()
    )
    assert sums[0] > 0 and (sums[1:] > 0).all() == quantised
    for other, gradients in others:
        assert (other - sums).abs().max() <= 1e-10 * sums.max()
        for name, gradient in gradients.items():
            assert (gradient - whole[name]).norm() <= 1e-10 * whole[name].norm(), name


def parts_of(coder: Coder, audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mels (B, M, F), vectors (B, N, D), and the numbers (B, N) of their codes."""
    mels = coder.features(audio)
    vectors = coder.dvae.encode(mels)
    codes = torch.cdist(
        vectors.detach().flatten(0, 1), coder.dvae.codebook.embed.detach().t()
    ).argmin(1)
    return mels, vectors, codes.view(vectors.shape[:2])


def test_the_gradient_of_the_vectors_is_the_decoders_at_the_codes(corpus):
    coder, batch = make_coder(make_items(corpus)), codec_training.collate(make_items(corpus))
    mels, vectors, codes = parts_of(coder, batch["audio"])
    assert (
        mels.shape == (4, 80, FRAMES)
        and codes.shape == (4, FRAMES // 4)
        and len(codes.unique()) > 4
    )
    quantised = coder.dvae.codebook.embed.detach().t()[codes].requires_grad_()
    error = (coder.dvae.reconstruct(quantised) - mels).abs().mean((1, 2)).sum()
    (at_codes,) = torch.autograd.grad(error, quantised)
    terms = codec_training.compute_loss(coder, batch)
    assert list(terms) == ["codebook", "commitment", "l1"] and terms.keys() == LOSS_WEIGHTS.keys()
    encoder = list(coder.dvae.encoder.parameters())
    ours = torch.autograd.grad(terms["l1"], encoder, retain_graph=True)
    expected = torch.autograd.grad(vectors, encoder, at_codes)
    assert terms["l1"].item() == pytest.approx(error.item(), rel=1e-12) and at_codes.abs().max() > 0
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).norm() <= 1e-10 * other.norm()
    book = coder.dvae.codebook.embed
    assert torch.autograd.grad(terms["l1"], book, retain_graph=True, allow_unused=True) == (None,)


def test_the_codebook_learns_from_the_vectors_and_they_from_it(corpus):
    coder, batch = make_coder(make_items(corpus)), codec_training.collate(make_items(corpus))
    _, vectors, codes = parts_of(coder, batch["audio"])
    book, weights = coder.dvae.codebook.embed, coder.dvae.encoder[-1].weight
    terms = codec_training.compute_loss(coder, batch)
    off = book.detach().t()[codes] - vectors.detach()  # (B, N, D)
    for name in ("codebook", "commitment"):
        assert terms[name].item() == pytest.approx(
            off.square().mean((1, 2)).sum().item(), rel=1e-12
        )
    expected = (
        torch.zeros_like(book.t())
        .index_add_(0, codes.flatten(), 2 * off.flatten(0, 1) / off[0].numel())
        .t()
    )
    gradients = {
        name: torch.autograd.grad(
            terms[name], (book, weights), retain_graph=True, allow_unused=True
        )
        for name in ("codebook", "commitment")
    }
    assert (gradients["codebook"][0] - expected).norm() <= 1e-10 * expected.norm() and gradients[
        "codebook"
    ][1] is None
    assert gradients["commitment"][0] is None and gradients["commitment"][1].norm() > 0
    (toward,) = torch.autograd.grad(vectors, weights, -2 * off / off[0].numel())
    assert (gradients["commitment"][1] - toward).norm() <= 1e-10 * toward.norm()


@torch.no_grad()
def test_an_evaluation_adds_up_its_batches(corpus):
    items = make_items(corpus, torch.float32)
    coder = make_coder(items)
    together = codec_training.evaluate(coder, [codec_training.collate(items)])
    apart = codec_training.evaluate(
        coder, [codec_training.collate(items[:1]), codec_training.collate(items[1:])]
    )
    for name, (total, count) in together.items():
        assert count == 4 and apart[name] == (pytest.approx(total, rel=1e-5), 4) and total > 0
    assert codec_training.evaluate(coder, []) == dict.fromkeys(LOSS_WEIGHTS, (0.0, 0))


# --- crops ----------------------------------------------------------------------------------------


def test_a_crop_depends_on_seed_epoch_and_clip_alone(corpus):
    crops, again, other = make_crops(corpus), make_crops(corpus), make_crops(corpus, seed=2)
    first = crops.item(1, 0)["audio"]
    for index in (4, 2, 3):
        again.item(index, 5)
    assert torch.equal(again.item(1, 0)["audio"], first)
    for item in (crops.item(1, 1), other.item(1, 0)):
        assert not torch.equal(item["audio"], first)
    evaluated = make_crops(corpus, training=False)
    beginning = torch.from_numpy(soundfile.read(corpus.paths[1], dtype="float32")[0][:CROP])
    for epoch in (0, 3):
        assert torch.equal(evaluated.item(1, epoch)["audio"], beginning)


def test_a_crop_may_reach_into_the_silence_after_a_clip_and_no_further(corpus):
    samples = torch.from_numpy(soundfile.read(corpus.paths[3], dtype="float32")[0])
    padded, crops, begins = (
        torch.nn.functional.pad(samples, (0, 4 * SAMPLES_PER_CODE)),
        make_crops(corpus),
        [],
    )
    for epoch in range(300):
        crop = crops.item(3, epoch)["audio"]
        assert crop.shape == (CROP,)
        begin = int((samples.unfold(0, 8, 1) == crop[:8]).all(1).nonzero()[0])
        assert torch.equal(crop, padded[begin : begin + CROP])
        begins.append(begin)
    last = len(padded) - CROP
    assert max(begins) <= last and max(begins) > 0.95 * last and min(begins) < 0.05 * last


@pytest.mark.parametrize("index", [0, 5])
@pytest.mark.parametrize("training", [True, False])
def test_a_clip_shorter_than_a_crop(corpus, index, training):
    samples = torch.from_numpy(soundfile.read(corpus.paths[index], dtype="float32")[0])
    item = make_crops(corpus, training=training).item(index, 2)
    room = max(0, len(samples) + 4 * SAMPLES_PER_CODE - CROP)
    if not room or not training:
        assert (
            torch.equal(item["audio"][: len(samples)], samples)
            and not item["audio"][len(samples) :].any()
        )
    assert item["audio"].shape == (CROP,) and item["index"] == index
    assert make_crops(corpus).seconds(0).tolist() == [CROP / SAMPLE_RATE] * len(SECONDS)


# --- the start ------------------------------------------------------------------------------------


def fitted(crops: Crops, seed: int, tensors: dict | None = None) -> Coder:
    coder = Coder(CONFIG, quantised=tensors is not None)
    fit(seed, seed, tensors, coder, crops)
    return coder


def audio_of(crops: Crops, seed: int) -> torch.Tensor:
    """All crops, in the order in which they are drawn."""
    return torch.stack([item["audio"] for item in some_items(crops, seed, len(crops))])


def test_the_first_run_begins_with_the_deviations_and_means_of_the_bands(corpus):
    crops = make_crops(corpus)
    coder = fitted(crops, 1)
    mels = Mel("dvae", torch.ones(80))(audio_of(crops, 1)).double()
    deviation = mels.std((0, 2)).clamp_min(codec_training.LEAST_DEVIATION)
    assert (coder.mel.mel_stats - deviation).abs().max() < 1e-4 and not coder.quantised
    assert (coder.dvae.decoder[-1].bias - mels.mean((0, 2)) / deviation).abs().max() < 1e-4
    assert coder.dvae.decoder[-1].bias.requires_grad and deviation.min() > 0.5
    assert "dvae.codebook.embed" not in dict(coder.named_parameters())


def test_a_band_without_power_has_a_deviation(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(SAMPLE_RATE), SAMPLE_RATE)
    (tmp_path / "m.csv").write_text("audio_file|text\na.wav|a", encoding="utf-8")
    corpus = load_corpus(str(tmp_path / "m.csv"), normalise, Checks())[0]
    coder = fitted(make_crops(corpus), 1)
    assert torch.equal(coder.mel.mel_stats, torch.full((80,), codec_training.LEAST_DEVIATION))


def test_the_second_run_begins_with_the_weights_of_the_first_and_a_codebook_by_kmeans(corpus):
    crops = make_crops(corpus)
    first = fitted(crops, 1)
    second = fitted(crops, 7, first.state_dict())
    before, after = first.state_dict(), second.state_dict()
    assert before.keys() == after.keys() and second.quantised
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "dvae.codebook.embed"
    }
    with torch.no_grad():
        vectors = first.dvae.encode(first.features(audio_of(crops, 7))).flatten(0, 1)
    assert torch.equal(
        after["dvae.codebook.embed"], kmeans(vectors, CONFIG["codes"], seeded(7)).t()
    )
    codes = second.dvae.codebook.nearest(vectors)
    assert len(codes.unique()) > CONFIG["codes"] // 2
    parameters = dict(second.named_parameters())
    assert parameters["dvae.codebook.embed"].requires_grad


def test_only_some_clips_are_read_for_the_start_and_not_the_first_ones(corpus, monkeypatch):
    """The first clips of a manifest that is sorted by speaker are of one voice."""
    read, item = [], Crops.item
    monkeypatch.setattr(codec_training, "FITTED", 3)
    monkeypatch.setattr(
        Crops, "item", lambda self, *place: read.append(place) or item(self, *place)
    )
    fitted(make_crops(corpus), 1)
    assert len(set(read)) == 3 and {epoch for _, epoch in read} == {0}
    assert sorted(index for index, _ in read) != [0, 1, 2]
