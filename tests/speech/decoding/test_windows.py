"""Windows of long recordings, joined by the times of their tokens: against one pass."""

import itertools
import json

import numpy as np
import pytest
import soundfile
import torch

from common.device import Setup
from models.parakeet import decoding, settings
from models.parakeet.model import Parakeet
from models.parakeet.tokenizer import make_tokenizer
from speech.decoding import long, recogniser, timed, transcribing, windows
from speech.decoding.timed import Token
from speech.signal.audio import SAMPLE_RATE
from speech.writing.text import CharTokenizer, train_tokenizer

STEP = 1280  # samples of a frame
LETTERS = "abcdefgh"
TOKENIZER = make_tokenizer(
    {"sentencepiece": train_tokenizer([f"{LETTERS} {LETTERS}."], "char", 0).model.hex()}, 11
)


def spoken(random: np.random.Generator, frames: int) -> list[Token]:
    """Words of random letters, with pauses and sentences, over so many frames."""
    tokens, frame = [], 0
    while frame < frames - 80:
        word = "".join(random.choice(list(LETTERS), random.integers(1, 7)))
        word += "." if random.random() < 0.1 else ""
        for piece in TOKENIZER.encode(word if not tokens else f"a {word}")[bool(tokens) :]:
            duration = int(random.integers(0, 4))
            tokens.append(Token(piece, frame, duration))
            frame += duration + int(random.integers(0, 2))
        frame += int(random.exponential(2)) + (40 if random.random() < 0.02 else 0)
    return tokens


def heard(
    tokens: list[Token], begin: int, end: int, random: np.random.Generator, wrong: int
) -> list[Token]:
    """What a model writes of a window of frames: times differ by a frame, and letters within
    `wrong` frames of its edges are anything."""
    found, latest = [], 0
    for token in tokens:
        if begin <= token.frame < end:
            frame = max(latest, token.frame - begin + int(random.integers(-1, 2)))
            piece = token.piece
            if (begin and token.frame < begin + wrong) or token.frame >= end - wrong:
                piece = int(random.integers(1, TOKENIZER.size))
            found.append(Token(piece, frame, token.duration))
            latest = frame
    return found


@pytest.mark.parametrize("seed", range(5))
def test_twenty_minutes_in_windows_are_one_pass(seed):
    random = np.random.default_rng(seed)
    samples = 1200 * SAMPLE_RATE + seed
    frames = samples // STEP
    tokens = spoken(random, frames)  # nothing is said in the last seconds
    pieces = long.overlapping_pieces(torch.zeros(samples), SAMPLE_RATE, 20.0, step=STEP)
    records = []
    for begin, end in pieces:
        found = heard(tokens, begin // STEP, end // STEP, random, wrong=12)
        records.append({"tokens": found, "frames": (end - begin) // STEP})
    joined = windows.join(TOKENIZER, STEP, records, pieces)
    whole = timed.transcript(tokens, TOKENIZER, 0.08, frames)
    assert len(joined.text) > 5000 and len(pieces) == 81 and joined.text == whole["text"]
    assert [word["text"] for word in joined.parts["words"]] == whole["text"].split()
    for word, expected in zip(joined.parts["words"], whole["words"], strict=True):
        assert word["start"] == pytest.approx(expected["start"], abs=0.081)
        assert word["start"] <= word["end"]
    assert len(joined.parts["segments"]) > len(whole["segments"]) > 50  # pauses end some
    assert " ".join(text for _, _, text in joined.pieces) == whole["text"]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(joined.pieces))


def near_sighted(waveform: np.ndarray) -> Parakeet:
    """A random model whose decisions depend on about a second of sound and on the label before: it
    has no attention, features without a mean over the recording, and a prediction network that
    forgets. Its joint network is fitted to the waveform, so that it writes all letters."""
    config = settings.make_config(32, 1, 2, (32, 1), 11, num_mel_bins=80, channels=8)
    torch.manual_seed(1)
    model = Parakeet({**config, "streaming": {"left": 56, "lookaheads": [0]}}).eval()
    for layer in model.encoder.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    torch.nn.init.normal_(model.joint.head.weight)
    torch.nn.init.zeros_(model.decoder.lstm.weight_hh_l0)
    length = torch.tensor([len(waveform)])
    batch = {"audio": torch.from_numpy(waveform).float()[None], "audio_lengths": length}
    with torch.no_grad():
        model.decoder.lstm.bias_hh_l0[32:64] = -30.0  # the forget gate
        projected = model.encoder_projector(
            model.encode({**batch, "audio_lengths_host": length})[0]
        )
        spread, mean = torch.std_mean(projected, (0, 1))
        model.encoder_projector.weight /= spread[:, None]
        model.encoder_projector.bias.copy_((model.encoder_projector.bias - mean) / spread)
        model.joint.head.bias[11] += 3.0  # blank
    return model


def test_a_model_reads_the_same_in_windows_as_in_one_pass(tmp_path):
    waveform = 0.1 * np.random.default_rng(0).standard_normal(50 * SAMPLE_RATE)
    waveform *= np.repeat(np.random.default_rng(1).uniform(0, 1, 500), 1600)
    soundfile.write(tmp_path / "a.wav", waveform, SAMPLE_RATE)
    model = near_sighted(waveform)

    def read(longest: float) -> dict:
        def decode(batch):
            assert len(batch["audio"]) <= 3 and batch["audio"].shape[1] <= longest * SAMPLE_RATE
            return decoding.transcripts(model, TOKENIZER, batch)

        output = tmp_path / f"{longest}.jsonl"
        paths = [str(tmp_path / "a.wav")]
        how = recogniser.DecodingOptions(transcribe=paths, output=str(output), batch_size=3)
        by_time = windows.by_time(TOKENIZER, STEP)
        transcribing.transcribe_files(how, decode, Setup(), longest, by_time, long.PARTS)
        return json.loads(output.read_text(encoding="utf-8"))

    whole, cut = read(100.0), read(12.0)
    assert len(whole["words"]) > 20 and len(whole["pieces"]) == 1 and len(cut["pieces"]) == 6
    assert cut["text"] == whole["text"] and cut["words"] == whole["words"]


def test_a_text_has_the_times_at_which_ctc_has_it():
    tokenizer = CharTokenizer(["a", "b", " "])
    blank = 4
    path = [1, 1, 4, 2, 3, 4, 4, 2, 2, 4]
    log_probs = torch.full((1, len(path), 5), 0.05)
    log_probs[0, range(len(path)), path] = 0.8
    log_probs = log_probs.log()
    (greedy,) = timed.greedy_ctc(log_probs, [len(path)], blank)
    tokens = timed.aligned(log_probs[0], tokenizer.encode("ab b"), blank)
    assert tokens == greedy and tokens[0].log_prob == pytest.approx(greedy[0].log_prob)
    (record,) = timed.transcripts([tokens], [len(path)], tokenizer, 0.04)
    assert record["text"] == "ab b"
    assert [(word["start"], word["end"], word["text"]) for word in record["words"]] == [
        (0.0, 0.16, "ab"),
        (0.28, 0.36, "b"),
    ]
    # A search may prefer another text: its tokens are where CTC has most of them.
    other = timed.aligned(log_probs[0], tokenizer.encode("ab a"), blank)
    assert [token.frame for token in other[:3]] == [0, 3, 4] and other[3].frame > 4
    assert timed.aligned(log_probs[0], [], blank) == []
