"""Greedy CTC with times, by hand-made log-probabilities. Long recordings:
tests/speech/decoding/test_windows.py."""

import math
from types import SimpleNamespace

import pytest
import torch

from models.wav2vec2 import decoding
from models.wav2vec2.tokenizer import Wav2Vec2Tokenizer
from speech.decoding import timed
from tests.models.wav2vec2.small import characters_state

TOKENIZER = Wav2Vec2Tokenizer(characters_state("abcd'"))
CONFIG = {"conv_stride": [5, 2, 2, 2, 2, 2, 2]}


def read(rows: list[str], share: float = 0.8, tokenizer=TOKENIZER) -> list[dict]:
    """The transcripts of utterances with one character a frame: `-` is the blank, `_` the space."""
    frames = [len(row) for row in rows]
    log_probs = torch.zeros(len(rows), max(frames), tokenizer.size)
    log_probs += math.log((1 - share) / (tokenizer.size - 1))
    for number, row in enumerate(rows):
        for frame, character in enumerate(row):
            piece = tokenizer.blank
            if character != "-":
                piece = tokenizer.pieces.index("\u2581" if character == "_" else character)
            log_probs[number, frame, piece] = math.log(share)
    model = SimpleNamespace(
        config=CONFIG,
        blank=tokenizer.blank,
        encode=lambda batch: (log_probs, frames),
        ctc_log_probs=lambda encoded: encoded,
    )
    return decoding.transcripts(model, tokenizer, {})


def words(row: dict) -> list[tuple]:
    return [(word["text"], word["start"], word["end"]) for word in row["words"]]


def test_words_begin_and_end_with_their_characters():
    found = read(["--aab--_--cc-c---", "a_b", "d", "---"])
    assert [row["text"] for row in found] == ["ab cc", "a b", "d", ""]
    assert words(found[0]) == [("ab", 0.04, 0.12), ("cc", 0.2, 0.3)]  # a frame longer than said
    assert words(found[1]) == [("a", 0.0, 0.02), ("b", 0.04, 0.06)]  # as long as there is room
    assert words(found[2]) == [("d", 0.0, 0.02)]
    assert found[3]["words"] == found[3]["segments"] == found[3]["tokens"] == []
    assert [row["frames"] for row in found] == [17, 3, 1, 3]
    assert found[0]["segments"] == [{"start": 0.04, "end": 0.3, "text": "ab cc"}]


def test_what_is_unknown_is_part_of_a_word():
    unknown = TOKENIZER.pieces.index("<unk>")
    log_probs = torch.nn.functional.one_hot(torch.tensor([[5, unknown, 6]]), TOKENIZER.size).float()
    model = SimpleNamespace(blank=0, ctc_log_probs=lambda encoded: encoded)
    tokens = decoding.decode(model, log_probs, [3])
    assert timed.transcript(tokens[0], TOKENIZER, 0.02, 3)["words"][0]["text"] == "a\ufffdb"


def test_the_confidence_of_a_word_is_the_mean_of_its_characters():
    for share in (0.5, 0.9):
        (found,) = read(["-aab-_-c-'-"], share)
        assert [word["confidence"] for word in found["words"]] == [share, share]


def test_decoding_is_that_of_a_plain_loop():
    torch.manual_seed(0)
    log_probs = torch.randn(6, 40, 7).log_softmax(2)
    lengths = [40, 1, 0, 13, 27, 40]
    model = SimpleNamespace(blank=3, ctc_log_probs=lambda encoded: encoded)
    found = decoding.decode(model, log_probs, lengths)
    for row, length, tokens in zip(log_probs, lengths, found, strict=True):
        path = row[:length].argmax(1).tolist()
        expected = []
        for frame, piece in enumerate(path):
            if piece != 3 and (frame == 0 or path[frame - 1] != piece):
                expected.append([piece, frame, 0, []])
            if piece != 3:
                expected[-1][3].append(float(row[frame, piece]))
        for number, each in enumerate(expected):
            following = expected[number + 1][1] if number + 1 < len(expected) else length
            each[2] = min(len(each[3]) + 1, following - each[1])
        assert [[t.piece, t.frame, t.duration] for t in tokens] == [each[:3] for each in expected]
        means = [sum(each[3]) / len(each[3]) for each in expected]
        assert [token.log_prob for token in tokens] == pytest.approx(means, rel=1e-5)
