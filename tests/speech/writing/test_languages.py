"""Languages in any form, and the language of a command's texts."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import options
from common.errors import UsageError
from models.whisper.tokenizer import LANGUAGES, OWN_CODES
from recipes import matcha_voice, whisper_vietnamese, xtts_amharic
from speech.writing import languages

GUIDE = Path(__file__).parents[3] / "docs/your_language.md"


@pytest.mark.parametrize(
    ("name", "code"),
    [("English", "en"), ("eng", "en"), ("eng_Latn", "en"), ("cmn", "zh"), ("nb-NO", "no"),
     ("jw", "jv"), ("iw", "he"), ("fil", "tl"), ("zh-HK", "yue"), ("zh-TW", "zh"), ("swh", "sw"),
     ("HAITIAN  creole", "ht"), ("Lingala", "ln"), ("mdw", "mdw"), ("kok-IN", "kok")],
)  # fmt: skip
def test_a_language_in_any_form(name, code):
    assert languages.code_of(name) == code


def test_all_languages_of_whisper_have_the_names_of_the_guide():
    listed = GUIDE.read_text(encoding="utf-8").split("**Whisper** (for")[1].split("A language")[0]
    named = dict(
        re.findall(r"([A-Z][A-Za-z ]+?) ([a-z]{2,3})(?=[,;.]| in `)", " ".join(listed.split()))
    )
    assert {*named.values()} == {*LANGUAGES}
    for name, code in named.items():
        assert OWN_CODES.get(languages.code_of(name), languages.code_of(name)) == code


def args_of(tmp_path, **given) -> SimpleNamespace:
    """Flags of a command; `rows`: the languages of the rows of its training data, `tested`: of
    those that it evaluates."""
    rows = given.pop("rows", None)
    tested = given.pop("tested", None)
    if rows is not None or tested is not None:
        name = "train_manifest" if tested is None else "test_manifest"
        given |= {name: [str(tmp_path / "one.json"), str(tmp_path / "train.json")]}
        (tmp_path / "one.json").write_text("5\n")
        texts = [{"audio_filepath": "a", "text": "a", "lang": each} for each in rows or tested]
        (tmp_path / "train.json").write_text("\n".join(map(json.dumps, texts)))
        given.setdefault("evaluate", tested is not None)
    commands = {"transcribe": False, "evaluate": False, "check_data": True, "dry_run": True}
    manifests = ("train_manifest", "test_manifest")
    others = ("language", "resume", "init_from", "tier", "audio_root")
    usual = dict.fromkeys((*commands, *manifests, *others))
    return SimpleNamespace(
        **{**usual, **given}, checkpoint_dir=tmp_path, rules=options.Rules(commands)
    )


@pytest.mark.parametrize(
    ("given", "language"),
    [
        ({}, "vi"),
        ({"dry_run": "8GB"}, "vi"),
        ({"language": "sw", "rows": ["ln"]}, "sw"),
        ({"rows": ["ln", "sw", "Swahili", "sw"]}, "sw"),
        ({"rows": ["Lingala"], "check_data": True}, "ln"),
        ({"rows": ["sw", ""], "resume": "run/best.safetensors"}, None),
        ({"rows": ["sw", ""], "init_from": "run/best.safetensors"}, None),
        ({"transcribe": ["a.wav"]}, None),
        ({"tested": ["sw", "sw", "ln"]}, "sw"),  # by a released model
        ({"tested": ["sw", ""]}, None),
        ({"tested": ["sw"], "resume": "run/best.safetensors"}, None),
    ],
)
def test_what_tells_the_language_of_the_texts(given, language, tmp_path):
    assert languages.resolve(args_of(tmp_path, **given), "vi") == language


@pytest.mark.parametrize(
    "given", [{}, {"check_data": True}, {"resume": "auto"}, {"dry_run": "8GB"}]
)
def test_own_data_are_never_taken_for_the_demos_language(given, tmp_path):
    args = args_of(tmp_path, rows=["sw", ""], **given)
    with pytest.raises(UsageError, match="add --language"):
        languages.resolve(args, "vi")
    assert languages.resolve(args, "vi", may_tell=True) is None
    (tmp_path / "checkpoint_step_00000001.pt").touch()
    assert given != {"resume": "auto"} or languages.resolve(args, "vi") is None


@pytest.mark.parametrize("recipe", [whisper_vietnamese, matcha_voice, xtts_amharic])
def test_recipes_ask_for_the_language_of_own_data(recipe, tmp_path):
    args_of(tmp_path, rows=["", ""])
    parser = options.Parser("")
    recipe.add_arguments(parser)
    begins = {whisper_vietnamese: ["--from_scratch"], xtts_amharic: ["--dry_run=8GB"]}
    words = ["--train_manifest", str(tmp_path / "train.json"), *begins.get(recipe, [])]
    with pytest.raises(UsageError, match="add --language"):
        recipe.resolve(parser.parse_args(words))
    assert recipe.resolve(parser.parse_args([*words, "--language", "Lingala"])).language == "ln"
