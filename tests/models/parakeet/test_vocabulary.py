"""Another vocabulary for a Parakeet: what the flags ask for, and the rows of its pieces. Whole
runs: tests/recipes/test_parakeet.py."""

import os
import shlex
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from common.errors import UsageError
from models.parakeet import tokenizer, vocabulary
from models.parakeet.settings import make_config
from models.parakeet.start import ModelInfo
from speech.data.manifest import Checks
from speech.writing.text import train_tokenizer
from tests.models.pieces import train_pieces

TEXTS = ["abc cab bca", "ab ca"] * 20


def make_info(**config) -> ModelInfo:
    state = {"sentencepiece": train_tokenizer(TEXTS, "char", 0).model.hex()}
    size = len(tokenizer.pieces(state))
    config = make_config(16, 1, 2, (8, 1), size, **config)
    return ModelInfo(
        config, state, {"sigma": 0.0, "omega": 0.0, "fastemit": 0.0, "reduction": "mean"}, {}, True
    )


def rows_of(info: ModelInfo, *names: str) -> dict[str, torch.Tensor]:
    """Random tensors of these names, each with its rows."""
    size = info.config["vocabulary"] + 1
    torch.manual_seed(0)
    shapes = {
        "decoder.embedding.weight": (size, 8),
        "joint.head.weight": (size + len(info.config["durations"]), 8),
        "joint.head.bias": (size + len(info.config["durations"]),),
        "ctc_head.weight": (size, 16, 1),
        "ctc_head.bias": (size,),
    }
    return {name: torch.randn(shapes[name]) for name in names}


@pytest.mark.parametrize(
    ("durations", "names"),
    [
        ([0, 1, 2, 3, 4], vocabulary.ROWS),
        ([0, 1, 2, 3, 4], vocabulary.ROWS[:3]),
        ([], vocabulary.ROWS[:3]),  # RNN-T
        ([], vocabulary.ROWS),  # with a CTC head
        ([], vocabulary.ROWS[3:]),  # CTC alone
    ],
)
@pytest.mark.parametrize("is_added", [False, True])
def test_shared_rows_are_copied_in_every_family(durations, names, is_added):
    info = make_info(durations=durations)
    weights = rows_of(info, *names)
    state = vocabulary.train_tokenizer(["bcख खd"], "char", 0)
    if is_added:
        state = vocabulary.add_lacking(info.tokenizer, ("(", "ख"))
    new, changed = vocabulary.with_new_vocabulary(info, weights, state)
    before, after = map(vocabulary.row_names, (info, new))
    assert new.config["vocabulary"] == len(tokenizer.pieces(state))
    assert {after[row] for row in new.new_pieces} == ({"(", "ख"} if is_added else {"ख", "d"})
    for name in names:
        lengths = len(after) - len(changed[name]), len(before) - len(weights[name])
        assert lengths[0] == lengths[1]
        for row, piece in enumerate(after[: len(changed[name])]):
            if piece in before:
                old = weights[name][before.index(piece)]
                assert torch.equal(changed[name][row], old), (name, piece)


def test_pieces_of_a_flag_and_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert vocabulary.read_pieces("( ) %  ° (") == ("(", ")", "%", "°")
    assert vocabulary.read_pieces(".") == (".",)  # no folder
    path = tmp_path / "pieces.txt"
    path.write_text("(\r\n\n %\n°", encoding="utf-8")
    assert vocabulary.read_pieces(str(path)) == ("(", "%", "°")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "names no piece"),
        ("gone.txt", "no such file"),
        ("a\u2581b", "a space in it"),
        ("e\u0301", "NFC"),
        ("<blank>", "special token"),
        ("binary", "it is not UTF-8"),
        ("pipe", "not a regular file"),
    ],
)
def test_pieces_that_cannot_be_added(value, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError) as error:
        vocabulary.read_pieces(value)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_form_of_a_tokenizer_is_taken(tmp_path):
    state = make_info().tokenizer
    (tmp_path / "new.model").write_bytes(bytes.fromhex(state["sentencepiece"]))
    content = tokenizer.hf_files(state)["tokenizer.json"]
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    (tmp_path / "config.json").write_text("{}")
    for path in ("new.model", "tokenizer.json", "."):
        found = vocabulary.read_tokenizer(str(tmp_path / path))
        assert tokenizer.pieces(found) == tokenizer.pieces(state)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.model", b"\x0a\x03\x0a\x01a" * 9, "cannot be used"),
        ("a.model", bytes(5_000_000), "too large"),
        ("a.model", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ("a.json", b"{", "damaged"),
        ("a.json", b'{"model": {"type": "WordLevel"}}', "cannot be used"),
        ("a.nemo", b"", "not a .nemo archive"),
    ],
)
def test_hostile_tokenizers_are_refused_in_one_line(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        vocabulary.read_tokenizer(str(path))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_piece_that_is_there_is_not_added_again():
    info = make_info()
    state = vocabulary.add_lacking(info.tokenizer, ("a", "%"))
    assert tokenizer.pieces(state) == [*tokenizer.pieces(info.tokenizer), "%"]
    with pytest.raises(UsageError, match="has all of these pieces"):
        vocabulary.add_lacking(info.tokenizer, ("a",))


def test_shares_are_of_the_texts_and_none_is_zero():
    known = SimpleNamespace(encode=lambda text: [ord(c) - 97 for c in text], size=4)
    found = vocabulary.shares(known, ["aab", "ab"], [0, 1, 3])
    assert torch.allclose(found, torch.tensor([4.0, 3.0, 1.0]) / 9)


def test_the_command_adds_what_the_vocabulary_reads_in_place_of_a_character():
    """Its normalisation makes 1\u20442 of a half, and no text ever has the half."""
    how = {"vocab_size": 12, "model_type": "char", "hard_vocab_limit": False}
    model = train_pieces(["abc 12"] * 9, normalization_rule_name="nmt_nfkc", **how)
    state = {"sentencepiece": model.hex()}
    before = tokenizer.make_tokenizer(state, len(tokenizer.pieces(state)))
    counts = Counter({"½": 2, "%": 1, "％": 1})
    origin = SimpleNamespace(path="a b.nemo", given={"text_column", "tier"})
    data = SimpleNamespace(checks=Checks(text_column="said", tiers=("tx@*", "a")))
    asked = SimpleNamespace(origin=origin, data=data, train_manifest=None)
    words = shlex.split(vocabulary.adding_command(before, asked, counts))
    assert words[3:8] == ["parakeet", "a b.nemo", "TEXTS", "--text_column", "said"]
    assert words[8:13] == ["--tier", "tx@*", "a", "--add_tokens", "% \u2044"]
    new = vocabulary.add_lacking(state, vocabulary.read_pieces(words[12]))
    after = tokenizer.make_tokenizer(new, len(tokenizer.pieces(new)))
    assert before.unknown in before.encode("½") and after.unknown not in after.encode("½ % ％")
    with pytest.raises(UsageError, match="--add_tokens: the piece '½' cannot be added"):
        vocabulary.add_lacking(state, ("½",))
