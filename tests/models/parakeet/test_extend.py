"""The command that gives a released Parakeet other pieces or a further language. Trainings from its
folders: tests/recipes/test_parakeet.py and test_nemotron.py."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from common.errors import UsageError
from models import extend as command
from models.parakeet import extend, formats, start, tokenizer, vocabulary
from models.parakeet.settings import make_config
from speech.signal.audio import SAMPLE_RATE
from speech.writing.text import train_tokenizer
from tests.models.parakeet.test_families import random_weights
from tests.recipes import runs

TEXTS = ("abc cab", "b", "cab ba", "ca", "a c", "bb", "ac b", "cba")
NAMES = {"en-US": 0, "de-DE": 1, "de": 1, "fi-FI": 4, "auto": 7}


def prepared(*flags) -> str:
    """The stdout of the command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command.main(["parakeet", *map(str, flags)])
    return out.getvalue()


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    """Eight utterances of noise."""
    texts = [f"({text})" for text in TEXTS]
    seconds = [0.5 + 0.1 * number for number in range(len(texts))]
    folder = tmp_path_factory.mktemp("noise")
    return Path(runs.write_noise(folder, texts, seconds, SAMPLE_RATE))


def release(folder: Path, form: str = "hf", **changes) -> Path:
    state = {"sentencepiece": train_tokenizer(TEXTS, "char", 0).model.hex()}
    config = make_config(16, 1, 2, (8, 1), len(tokenizer.pieces(state)), num_mel_bins=16, **changes)
    extras = {
        "tokenizer": state,
        "source": {},
        "loss": {"sigma": 0.0, "omega": 0.0, "fastemit": 0.0, "reduction": "mean_batch"},
        "languages": NAMES if "prompts" in config else {},
    }
    formats.export(folder, form, random_weights(config), config, extras)
    return folder


def test_another_tokenizer_from_a_file_and_more_pieces(manifest, tmp_path):
    source = release(tmp_path / "hf")
    path = tmp_path / "new.model"
    path.write_bytes(train_tokenizer(["xyz abc"] * 9, "char", 0).model)
    made = [manifest, "--tokenizer", path, "--add_tokens", "( )"]
    prepared(source, *made, "--export", tmp_path / "new")
    info, weights = start.read(tmp_path / "new")
    names = start.tokenizer_of(info).pieces
    assert names[-2:] == ["(", ")"] and {"x", "y", "z", "a"} <= set(names)
    assert {names[piece] for piece in info.new_pieces} == {"x", "y", "z", "(", ")"}
    before, old = start.read(source)
    row = names.index("a"), start.tokenizer_of(before).pieces.index("a")
    name = "joint.head.weight"
    assert torch.equal(weights[name][row[0]], old[name][row[1]])


def test_pieces_of_two_folders_in_a_row_are_all_new(manifest, tmp_path):
    source = release(tmp_path / "hf", form="nemo", ctc=True)
    prepared(source, manifest, "--add_tokens", "(", "--export", tmp_path / "a")
    prepared(tmp_path / "a", manifest, "--add_tokens", ")", "--export", tmp_path / "b")
    info, weights = start.read(tmp_path / "b" / "model.nemo")
    size = info.config["vocabulary"]
    assert info.new_pieces == [size - 2, size - 1] and "ctc_head.weight" in weights
    assert info.base == "hf"


def test_a_folder_is_the_same_every_time(manifest, tmp_path):
    source = [release(tmp_path / "hf"), manifest]
    made = [*source, "--train_tokenizer", "bpe", "--vocab_size", "12", "--export"]
    first, second = tmp_path / "a", tmp_path / "b"
    prepared(*made, first)
    prepared(*made, second)
    weights = start.read(first)[1], start.read(second)[1]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert json.loads((first / formats.NOTE).read_text())["new_pieces"]


def test_the_share_of_the_old_pieces_is_divided_among_the_new_ones(manifest, tmp_path):
    """In every frame of a CTC model: a new piece has its share in the texts of the probability of
    all old ones, as far as one row can say it."""
    source = release(tmp_path / "hf", kind="ctc", durations=[], ctc=True)
    made = [manifest, "--add_tokens", "( )", "--export", tmp_path / "new"]
    prepared(source, *made)
    info, weights = start.read(tmp_path / "new")
    model = start.make_model(info, weights).eval()
    corpus = extend.load_corpus(str(manifest), extend.text.normalise, extend.Checks())[0]
    reader = start.tokenizer_of(info)
    with torch.no_grad():
        encoded, frames = model.encode(extend.training_batch(corpus, reader))
        found = model.ctc_log_probs(encoded)[:, :, :-1]
    shares = vocabulary.shares(reader, corpus.texts, info.new_pieces)
    old = found[:, :, : -len(shares)].logsumexp(2)
    for column, share in zip(info.new_pieces, shares, strict=True):
        wanted = old + share.log()
        errors = [(found[i, :n, column] - wanted[i, :n]) for i, n in enumerate(frames)]
        assert torch.cat(errors).mean().abs() < 0.05


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory) -> Path:
    changes = {
        "kind": "rnnt",
        "durations": [],
        "streaming": {"left": 12, "lookaheads": [3, 0]},
        "prompts": {"slots": 9, "width": 32},
    }
    return release(tmp_path_factory.mktemp("nemotron") / "hf", **changes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{model}", "nothing says what the new model shall have: add --add_tokens"),
        ("{model} --add_tokens (", "new pieces are fitted to training data: name its manifest"),
        ("{model} {data} --add_tokens a", "has all of these pieces"),
        ("{model} {data} --vocab_size 9 --train_tokenizer char", "goes with"),
        ("{model} {data} --tokenizer {data}", "--tokenizer {data}: "),
        ("{model} --new_language se-NO", "--new_language goes with --like"),
        ("{model} --new_language sami --like de", "give it the form of fi-FI"),
        ("{model} --new_language fi-FI --like de", "knows this language already"),
        ("{model} --new_language se-NO --like fin", "nearest are fi-FI"),
        ("{english} --new_language se-NO --like de", "is told no language"),
        ("{model} --new_language se-NO --like de --export {data}", "--export {data}: "),
        ("{model} --new_language se-NO --like de --export {model}", "name a folder of its own"),
    ],
)
def test_mistakes_are_answered_in_one_line(line, message, manifest, nemotron, tmp_path):
    places = {"data": manifest, "model": nemotron, "english": tmp_path / "english"}
    if "{english}" in line:
        release(tmp_path / "english")
    words = line.format(**places).split()
    if "--export" not in words:
        words += ["--export", str(tmp_path / "new")]
    with pytest.raises(UsageError) as error:
        prepared(*words)
    assert message.format(**places) in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()
