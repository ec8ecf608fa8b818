"""The recipes as the page sees them."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from common.errors import UsageError
from webui import catalogue, commands
from webui.places import Places

RECIPES = catalogue.find_recipes()
NAMES = sorted(RECIPES)


def plain(text: str) -> str:
    return " ".join(text.split())


def test_all_recipes_are_found():
    files = {file.stem for file in (catalogue.ROOT / "recipes").glob("*.py")}
    assert set(RECIPES) == files - {"template"}
    for recipe in RECIPES.values():
        assert not recipe.fault and recipe.title and "dry_run" in recipe.commands
        if recipe.page:  # a user's copy has none, and no script
            assert recipe.script and "cpu" in recipe.tiers and recipe.sizes
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
        "learning_rate": "5e-6",
        "tf32": "on",
        "allow_unknown": "off",
        "max_steps": "",
        "evaluate": "",
    }
    assert {name: recipe.option(name).default for name in expected} == expected
    assert "5 %" in recipe.option("allow_unknown").help and "%%" not in str(recipe.options)


def copied(tmp_path: Path, script: bool) -> catalogue.Recipe:
    """A recipe that a user has made of the template, in another project."""
    (tmp_path / "recipes").mkdir()
    shutil.copy(catalogue.ROOT / "recipes" / "template.py", tmp_path / "recipes" / "mine.py")
    if script:
        text = (catalogue.ROOT / "run_training_memory_optimized.sh").read_text()
        text = re.sub(r"^\* .*\n", "", text, flags=re.MULTILINE)
        text = text.replace("konkani_conformer", "mine")
        (tmp_path / "run_mine.sh").write_text(text)
        (tmp_path / "common").mkdir()
        for name in ("env.sh", "preset.py"):
            shutil.copy(catalogue.ROOT / "common" / name, tmp_path / "common")
    return catalogue.find_recipes(tmp_path / "recipes")["mine"]


@pytest.mark.parametrize("script", [False, True])
def test_a_copied_recipe_appears(tmp_path, script):
    recipe = copied(tmp_path, script)
    (tmp_path / "train.csv").write_text("audio_file|text\n")
    places = Places(tmp_path, tmp_path / "runs")
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
    own = [f"--output_dir={places.runs / 'new'}"]
    own += ["--train_manifest", str(places.data / "train.csv"), "--dropout=0.2"]
    assert made.words[:2] == [sys.executable, str(recipe.file)]
    assert sorted(made.words[-4:]) == sorted(own)
    preset = "--mixed_precision --batch_size 2 --gradient_accumulation_steps 4"
    assert shlex.join(made.words[2:-4]).startswith(preset if script else "")
    assert bool(made.words[2:-4]) is script


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
