"""The recipes as the page sees them, and the commands that it makes."""

import contextlib
import io
import random
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from common.errors import Failure, UsageError
from webui import catalogue, commands, plans
from webui.places import Places

RECIPES = catalogue.find_recipes()
NAMES = sorted(RECIPES)
# Values that try to be more than a value.
HOSTILE = (
    "--resume=/etc/passwd",
    "-h",
    "--",
    "; rm -rf /",
    "$(id)",
    "`id`",
    "a\nb",
    "\0",
    "\ud800",
    "../../../etc/passwd",
    "/etc/passwd",
    "'",
    '"',
    "\\",
    "x" * 20_000,
    "--synthesize /etc/passwd",
    "a --export=/tmp/x",
    "'--resume=/etc/passwd x'",
    "ሰላም ለዓለም።",
    "क्‍ष",
)


@pytest.fixture
def places(tmp_path) -> Places:
    for name in ("data", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside.txt").write_text("a text")
    (tmp_path / "data" / "train.csv").write_text("audio_file|text\n")
    return Places(tmp_path / "data", tmp_path / "runs")


def words_of(places: Places, recipe: catalogue.Recipe, name: str, text: str) -> list[str]:
    return commands.words_of(places, recipe.option(name), text, places.runs / "new")


def plain(text: str) -> str:
    return " ".join(text.split())


# --- options --------------------------------------------------------------------------------------


def test_all_recipes_are_found():
    files = {file.stem for file in (catalogue.ROOT / "recipes").glob("*.py")}
    assert set(RECIPES) == files - {"template"}
    for recipe in RECIPES.values():
        assert not recipe.fault
        assert recipe.script and recipe.page and recipe.title
        assert "cpu" in recipe.tiers and recipe.sizes and "dry_run" in recipe.commands
        assert len(recipe.first) == 10


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_is_an_option_with_its_own_help(name):
    recipe = RECIPES[name]
    printed = plain(recipe.parser.format_help())
    names = [option.name for option in recipe.options]
    assert len(names) > 50 and len(names) == len(set(names))
    assert {"help", *names} == {action.dest for action in recipe.parser._actions}
    for option in recipe.options:
        assert f"{option.group}:" in printed
        for part in re.split(r"; --\w+: ", option.help):
            assert part and part in printed
        if option.default:
            assert option.default in printed


def test_options_of_one_name_are_one():
    option = RECIPES["xtts_amharic"].option("mixed_precision")
    assert option.flag == "--mixed_precision"
    assert option.choices == ("", "auto", "fp16", "bf16", "no")
    assert "--bf16" in option.help and "fp32 throughout" in option.help
    option = RECIPES["xtts_amharic"].option("train_manifest")
    assert option.flag == "--train_manifest"
    assert "another name" not in option.help


def test_defaults_are_those_of_the_help():
    recipe = RECIPES["xtts_amharic"]
    expected = {
        "keep_last": "2",
        "max_duration": "11.6",
        "learning_rate": "5e-6 for released weights, 2e-3 from scratch",
        "tf32": "on",
        "allow_unknown": "off",
        "max_steps": "",
        "evaluate": "",
    }
    assert {name: recipe.option(name).default for name in expected} == expected
    assert "5 %" in recipe.option("allow_unknown").help and "%%" not in str(recipe.options)


def copied(tmp_path: Path, script: bool) -> catalogue.Recipe:
    """A recipe that a user has made of the template, in a project of its own."""
    (tmp_path / "recipes").mkdir()
    shutil.copy(catalogue.ROOT / "recipes" / "template.py", tmp_path / "recipes" / "mine.py")
    if script:
        text = (catalogue.ROOT / "run_training_memory_optimized.sh").read_text()
        text = re.sub(r"^\* .*\n", "", text, flags=re.MULTILINE)
        text = text.replace("konkani_conformer", "mine")
        (tmp_path / "run_mine.sh").write_text(text)
        (tmp_path / "common").mkdir()
        shutil.copy(catalogue.ROOT / "common" / "env.sh", tmp_path / "common")
    return catalogue.find_recipes(tmp_path / "recipes")["mine"]


@pytest.mark.parametrize("script", [False, True])
def test_a_copied_recipe_appears(places, tmp_path, script):
    recipe = copied(tmp_path, script)
    assert not recipe.fault
    assert recipe.title == (
        "The smallest complete recipe: a recogniser of characters by CTC, to copy and adapt"
    )
    assert recipe.option("dropout").default == "0.1"
    settings = {"values": {"train_manifest": "train.csv", "dropout": "0.2"}}
    if not script:
        with pytest.raises(UsageError, match="mine has no tier '8gb'"):
            commands.command(places, recipe, {"tier": "8gb"}, places.runs / "new")
    else:
        assert recipe.tiers[0] == "4gb" and recipe.script.name == "run_mine.sh"
        settings |= {"tier": "t4"}
    made = commands.command(places, recipe, settings, places.runs / "new")
    own = [
        f"--output_dir={places.runs / 'new'}",
        f"--train_manifest={places.data / 'train.csv'}",
        "--dropout=0.2",
    ]
    assert made.words[:2] == [sys.executable, str(recipe.file)]
    assert made.words[-3:] == own
    preset = "--mixed_precision --batch_size 2 --gradient_accumulation_steps 4"
    assert shlex.join(made.words[2:-3]).startswith(preset if script else "")
    assert bool(made.words[2:-3]) is script


def test_a_recipe_that_cannot_be_imported_has_a_fault(tmp_path):
    (tmp_path / "half.py").write_text("def add_arguments(:\n")
    (tmp_path / "other.py").write_text('"""Something else."""\n')
    (tmp_path / "ends.py").write_text("raise SystemExit(3)\n")
    found = catalogue.find_recipes(tmp_path)
    assert (
        found["half"].fault
        == "half.py cannot be used: SyntaxError: invalid syntax (half.py, line 1)"
    )
    assert "add_arguments" in found["other"].fault and found["ends"].fault
    with pytest.raises(UsageError, match=r"half\.py cannot be used"):
        commands.command(None, found["half"], {}, tmp_path)


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
    with pytest.raises(UsageError, match="in the folder of the run"):
        words_of(places, RECIPES["whisper_morse"], "write_dataset", f"{outside} 3")
    found = words_of(places, recipe, "export", "voice")
    assert found == [f"--export={places.runs / 'new' / 'voice'}"]
    assert words_of(places, recipe, "resume", "auto") == ["--resume=auto"]
    found = words_of(places, recipe, "synthesize", "'km/h' train.csv")
    assert found == ["--synthesize", "km/h", str(places.data / "train.csv")]


def test_what_the_page_decides_is_refused(places):
    for name in ("output_dir", "checkpoint_dir", "log_dir", "dry_run"):
        assert RECIPES["parakeet_tdt"].option(name).own
        with pytest.raises(UsageError, match=f"--{name} cannot be changed: "):
            words_of(places, RECIPES["parakeet_tdt"], name, "x")


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
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
    settings = {"values": {"train_manifest": "train.csv", "from_scratch": "on"}}
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
        ({"values": {"bf16": "on"}}, "whisper_vietnamese has no option --bf16"),
        ({"values": {"transcribe": "'a"}}, "--transcribe: a quotation mark is missing"),
        (
            {"values": {"resume": "a.pt", "init_from": "b.pt"}},
            "--resume and --init_from: the first",
        ),
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
    settings = {"values": {"train_manifest": path.name, "from_scratch": "on"}}
    made = commands.command(places, recipe, settings, places.runs / "new")
    assert f"--train_manifest={path}" in made.words and "--batch_size" in made.words


def test_a_resumed_command_continues_its_own_checkpoints(places):
    recipe = RECIPES["parakeet_tdt"]
    values = {"init_from": "other/best.safetensors", "max_steps": "5"}
    made = commands.command(places, recipe, {"values": values}, places.runs / "new")
    assert commands.resumed(made.words) == made.words  # nothing is saved
    left_out = f"--init_from={places.data / 'other/best.safetensors'}"
    without = [word for word in made.words if word != left_out]
    # A stage before the training may have saved something.
    assert commands.resumed(without) == [*without, "--resume=auto"]
    checkpoint = places.runs / "new" / "checkpoints" / "checkpoint_step_00000002.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    assert commands.resumed(made.words) == [*without, "--resume=auto"]
    made = commands.command(places, recipe, {}, places.runs / "new")  # has --resume auto
    place = made.words.index("--resume")
    expected = [*made.words[:place], *made.words[place + 2 :], "--resume=auto"]
    assert commands.resumed(made.words) == expected


def test_a_short_command_is_run_to_its_end():
    code = (
        "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); sys.exit(3)"
    )
    assert commands.ask([sys.executable, "-c", code]) == (3, "out\nerr\n")
    endless = "import subprocess; subprocess.run(['sleep', '100'])"
    with pytest.raises(Failure, match="it took more than 1 s and was ended"):
        commands.ask([sys.executable, "-c", endless], 1)


# --- plans ----------------------------------------------------------------------------------------


def planned(recipe: catalogue.Recipe, capsys, *flags: str) -> plans.Verdict:
    """What the page reads of the --dry_run of a recipe."""
    module = sys.modules[recipe.resolve.__module__]
    with contextlib.suppress(SystemExit):
        module.exit_with_one_line(lambda: module.main(recipe.parser.parse_args(list(flags))))
    captured = capsys.readouterr()
    return plans.verdict(recipe, captured.out + captured.err)


def test_verdicts_are_those_of_a_dry_run(tmp_path, capsys):
    recipe = copied(tmp_path, False)
    size = ["--batch_size", "8", "--output_dir", str(tmp_path)]
    fits = planned(recipe, capsys, *size, "--dry_run", "24gb")
    assert (fits.word, fits.after, fits.flags) == ("fits", "", {})
    memory = dict(fits.memory)
    assert memory["24gb"] == "22.00 GiB" and {"weights", "activations", "total", "left"} <= set(
        memory
    )
    assert any(line.startswith("Peak: ") for line in fits.lines)
    assert fits.lines[-1].endswith("hence the margin")

    helped = planned(recipe, capsys, *size, "--dry_run", "0.7")
    assert (helped.word, helped.after) == ("does not fit", "fits")
    assert helped.flags.keys() >= {"batch_size", "gradient_accumulation_steps"}
    assert int(helped.flags["batch_size"]) * int(helped.flags["gradient_accumulation_steps"]) == 32
    words = [f"--{name}={value}" for name, value in helped.flags.items()]
    assert planned(recipe, capsys, *size, *words, "--dry_run", "0.7").word == "fits"

    nothing = planned(recipe, capsys, *size, "--dry_run", "0.5")
    assert (nothing.word, nothing.after, nothing.flags) == ("does not fit", "does not fit", {})
    assert any("take a smaller model" in line for line in nothing.advice)
    assert not fits.advice

    with pytest.raises(UsageError, match="--dry_run: 'tomato' is not a GPU"):
        planned(recipe, capsys, *size, "--dry_run", "tomato")


@pytest.mark.parametrize(
    "flags, values",
    [
        ("--use_cpu_offload", {"use_cpu_offload": "states"}),
        (
            "--optimizer adamw --use_cpu_offload gradients",
            {"optimizer": "adamw", "use_cpu_offload": "gradients"},
        ),
        ("--gradient_checkpointing", {"gradient_checkpointing": "on"}),
        ("--freeze_encoder", {"freeze_encoder": "on"}),
        ("--no_tf32 --batch_size 1", {"tf32": "off", "batch_size": "1"}),
    ],
)
def test_flags_of_the_advice_are_values_of_a_form(flags, values):
    text = f"Verdict: does not fit (it ...)\n  {flags}: 1.20 GiB less\n"
    text += "Peak with these flags: 7.00 GiB of 8.00 GiB (8gb): tight"
    assert plans.verdict(RECIPES["whisper_morse"], text).flags == values


def test_cards_are_those_of_the_plans():
    assert {"4gb", "t4", "a100", "RTX 3060"} <= set(plans.cards())


def test_nothing_of_the_page_is_imported():
    for name in ("commands.py", "places.py"):
        assert "gradio" not in (catalogue.ROOT / "webui" / name).read_text()
