"""The commands that the page makes of a form's values."""

import contextlib
import io
import random
import re
import shlex
import sys
from pathlib import Path

import pytest

from common.errors import Failure, UsageError
from webui import catalogue, commands, plans
from webui.places import Places

RECIPES = catalogue.find_recipes()
NAMES = sorted(name for name in RECIPES if RECIPES[name].page)  # without copies of a user
# Values that try to be more than a value.
HOSTILE = (
    "--resume=/etc/passwd",
    "-h",
    "--",
    "$(id)",
    "a\nb",
    "\ud800",
    "../../../etc/passwd",
    "/etc/passwd",
    "'",
    "x" * 20_000,
    "a --export=/tmp/x",
    "'--resume=/etc/passwd x'",
    "ሰላም ለዓለም።",
)


@pytest.fixture
def places(here, tmp_path) -> Places:
    (tmp_path / "outside.txt").write_text("a text")
    (here.data / "train.csv").write_text("audio_file|text\n")
    return here


def words_of(places: Places, recipe: catalogue.Recipe, name: str, text: str) -> list[str]:
    return commands.words_of(places, recipe.option(name), text, places.runs / "new")


# --- values ---------------------------------------------------------------------------------------


def value_for(option: catalogue.Option, random_: random.Random) -> str:
    """A value that an option may take."""
    if option.choices and option.several:
        return shlex.join(random_.sample(option.choices, random_.randint(1, len(option.choices))))
    if option.choices:
        return random_.choice(option.choices[1:])
    if option.is_path and option.name in commands.OUTPUTS:
        return "made 3" if option.several else "made here"
    if option.is_path:
        return "'a b.wav' c.wav" if option.several else "a b.wav"
    if option.metavar == ("TEXT",):
        return "'ሰላም  ለዓለም።' two"
    if option.metavar == ("LOW", "HIGH"):
        return {"wpm": "12 20", "tone": "500 600"}.get(option.name, "-5 10")
    known = {"language": "kok", "device": "cpu", "allocator_conf": "a:b", "beam_size": "4"}
    return known.get(option.name) or random_.choice(["1", "0.5", "30000"])


@pytest.mark.parametrize("name", NAMES)
def test_values_come_back_from_the_parser(name, places):
    """A form's values, through words and the recipe's parser, are these values again."""
    recipe = RECIPES[name]
    random_ = random.Random(name)
    for option in recipe.options:
        if option.own:
            continue
        args = None
        while args is None:  # not every number is in its range
            text = value_for(option, random_)
            words = words_of(places, recipe, option.name, text)
            with contextlib.suppress(UsageError):
                args = recipe.parser.parse_args(words)
        assert args.given == {option.name}, option
        again = commands.values_of(recipe, words)[option.name]
        assert recipe.parser.parse_args(words_of(places, recipe, option.name, again)) == args
        if option.choices or not option.is_path:
            assert again == text or [*map(float, again.split())] == [*map(float, text.split())]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_value_stays_a_value(name, text, places):
    """Whatever is typed, it sets no other option and names nothing outside."""
    recipe = RECIPES[name]
    refused = 0
    for option in recipe.options:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                args = recipe.parser.parse_args(words_of(places, recipe, option.name, text))
            except UsageError as error:
                assert len(str(error).splitlines()) == 1
                refused += 1
                continue
        assert args.given == {option.name} and not printed.getvalue()
        value = getattr(args, option.name)
        for each in value if isinstance(value, list) else [value]:
            if option.is_path and "/" in str(each):
                assert Path(each).is_relative_to(places.data.parent)
                assert Path(each) == Path(each).resolve()
    assert refused > 40  # numbers and choices at least


def test_paths_outside_are_refused(places):
    outside = places.data.parent / "outside.txt"
    (places.data / "link.csv").symlink_to(outside)
    recipe = RECIPES["xtts_amharic"]
    inputs = ["train_manifest", "model_dir", "speaker_wav", "lexicon", "init_from", "resume"]
    for name in [*inputs, "synthesize", "show_text"]:
        for text in (str(outside), "../outside.txt", "link.csv"):
            with pytest.raises(UsageError, match="outside of the folders"):
                words_of(places, recipe, name, text)
    for name in ("export", "output", "cache_audio"):
        for text in (str(outside), "../other", ".", "..", "a/../..", str(places.data / "x")):
            with pytest.raises(UsageError, match="in the folder of the run"):
                words_of(places, recipe, name, text)
    found = words_of(places, recipe, "export", "voice")
    assert found == [f"--export={places.runs / 'new' / 'voice'}"]
    assert words_of(places, recipe, "resume", "auto") == ["--resume=auto"]
    found = words_of(places, recipe, "synthesize", "'km/h' train.csv")
    assert found == ["--synthesize", "km/h", str(places.data / "train.csv")]


def test_what_the_page_decides_is_refused(places):
    for name in ("output_dir", "dry_run"):
        assert RECIPES["parakeet_tdt"].option(name).own
        with pytest.raises(UsageError, match=f"--{name} cannot be changed: "):
            words_of(places, RECIPES["parakeet_tdt"], name, "x")


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name != "xtts_amharic"])  # no demo
def test_the_command_is_that_of_the_preset_script(name, places):
    recipe = RECIPES[name]
    folder = places.runs / "a b"
    made = commands.command(places, recipe, {}, folder)
    _, printed, _ = catalogue.run_script(recipe.script, f"--output_dir={folder}", "--print")
    expected = shlex.split(printed)[1:]
    if "--output_dir" in expected:  # the script's own folder
        del expected[(place := expected.index("--output_dir")) : place + 2]
    assert made.words[1:] == expected
    assert "tier: cpu (auto)" in made.notes or plans.this_card()
    for tier in recipe.tiers:
        made = commands.command(places, recipe, {"tier": tier}, folder)
        assert "--batch_size" in made.words and not made.notes


def test_a_plan_has_the_tier_of_its_card(places):
    recipe = RECIPES["xtts_amharic"]
    settings = {"values": {"train_manifest": "train.csv", "language": "am"}}
    made = commands.command(places, recipe, settings, places.runs / "new", "8GB")
    assert made.notes[0] == "tier: 8gb (auto)" and made.words[-1] == "--dry_run=8GB"
    values, notes = commands.preset(places, recipe, {**settings, "tier": "8gb", "size": "full"})
    assert values["batch_size"] == "20" and values["gradient_checkpointing"] == "on"
    assert values["gradient_accumulation_steps"] == "12" and values["optimizer"] == "adamw_8bit"
    assert notes[0].startswith("data: ")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tier": "--resume=/etc/passwd"}, "has no tier"),
        ({"tier": "cpu", "size": "--export=/tmp/x"}, "has no size"),
        (
            {"tier": "4gb", "size": "large"},
            "large does not fit in tier 4gb: take small, base or tiny",
        ),
        ({"values": {"unknown": "1"}}, "whisper_vietnamese has no option --unknown"),
        ({"values": {"num_epochs": "many"}}, "argument --num_epochs: 'many' is not a whole number"),
        ({"values": {"transcribe": "'a"}}, "--transcribe: a quotation mark is missing"),
        ({"values": {"val_manifest": "train.csv"}}, "--val_manifest goes with --train_manifest"),
    ],
)
def test_what_a_recipe_refuses_is_one_line(settings, message, places):
    with pytest.raises(Failure, match=re.escape(message)) as error:
        commands.command(places, RECIPES["whisper_vietnamese"], settings, places.runs / "new")
    assert len(str(error.value).splitlines()) == 1


def test_names_in_any_script_pass_the_preset_script(places):
    """The script prints the words quoted for bash. They are not read from there."""
    path = places.data / "ሰላም 'x' $HOME \\ ‍.csv"
    path.write_text("audio_file|text\n")
    recipe = RECIPES["parakeet_tdt"]
    settings = {"values": {"train_manifest": shlex.quote(path.name), "from_scratch": "on"}}
    made = commands.command(places, recipe, settings, places.runs / "new")
    assert made.words[made.words.index("--train_manifest") + 1] == str(path)
    assert "--batch_size" in made.words


def test_a_resumed_command_continues_its_own_checkpoints(places):
    recipe = RECIPES["parakeet_tdt"]
    values = {"resume": "other/checkpoint_step_00000002.pt", "max_steps": "5"}
    made = commands.command(places, recipe, {"values": values}, places.runs / "new")
    assert commands.resumed(made.words) == made.words  # nothing is saved
    left_out = f"--resume={places.data / 'other/checkpoint_step_00000002.pt'}"
    without = [word for word in made.words if word != left_out]
    assert len(without) == len(made.words) - 1
    assert commands.resumed(without) == [*without, "--resume=auto"]
    checkpoint = places.runs / "new" / "checkpoints" / "checkpoint_step_00000002.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    assert commands.resumed(made.words) == [*without, "--resume=auto"]
    made = commands.command(places, recipe, {}, places.runs / "new")  # has --resume auto
    place = made.words.index("--resume")
    expected = [*made.words[:place], *made.words[place + 2 :], "--resume=auto"]
    assert commands.resumed(made.words) == expected
    values = {"init_from": "other/best.safetensors"}  # is read unless there is a checkpoint
    made = commands.command(places, recipe, {"values": values}, places.runs / "new")
    assert f"--init_from={places.data / 'other/best.safetensors'}" in commands.resumed(made.words)


def test_a_short_command_is_run_to_its_end():
    code = (
        "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); sys.exit(3)"
    )
    assert commands.ask([sys.executable, "-c", code]) == (3, "out\nerr\n")
    endless = "import subprocess; subprocess.run(['sleep', '100'])"
    with pytest.raises(Failure, match="it took more than 1 s and was ended"):
        commands.ask([sys.executable, "-c", endless], 1)


def test_nothing_of_the_page_is_imported():
    for name in ("commands.py", "places.py"):
        assert "gradio" not in (catalogue.ROOT / "webui" / name).read_text()
