"""Command lines of the recipes: the original guide's commands still work, contradictions are one
line."""

import argparse
import contextlib

import pytest

from common import options
from common.errors import UsageError
from recipes import (
    konkani_conformer,
    matcha_voice,
    parakeet_tdt,
    wav2vec2_ctc,
    whisper_morse,
    whisper_vietnamese,
    xtts_amharic,
)
from tests import processes

RECOGNISERS = [konkani_conformer, parakeet_tdt, wav2vec2_ctc, whisper_morse, whisper_vietnamese]
VOICES = [matcha_voice, xtts_amharic]
RECIPES = pytest.mark.parametrize(
    "recipe", [*RECOGNISERS, *VOICES], ids=lambda recipe: recipe.RECIPE
)


def make_parser(recipe) -> options.Parser:
    parser = options.Parser(recipe.__doc__)
    recipe.add_arguments(parser)
    return parser


EVERY = {
    flag
    for recipe in (*RECOGNISERS, *VOICES)
    for flag in make_parser(recipe)._option_string_actions
}


# --- the original guide ---------------------------------------------------------------------------

RESUME = "--mixed_precision --device cuda --resume checkpoints/checkpoint_epoch_15.pt"
SHAPE = ("batch_size", "gradient_accumulation_steps", "d_model", "encoder_layers", "decoder_layers")
UPDATE = "--batch_size {} --gradient_accumulation_steps {}"
LAYERS = "--d_model {} --encoder_layers {} --decoder_layers {}"
GUIDE = {  # flags, and their values
    f"{UPDATE} {LAYERS}".format(*values): values
    for values in ((1, 8, 192, 8, 4), (2, 4, 128, 6, 3))
} | {UPDATE.format(1, 8): (1, 8, None, None, None)}


@pytest.mark.parametrize("command", GUIDE)
def test_the_guides_commands(command):
    args = make_parser(konkani_conformer).parse_args(f"{command} {RESUME}".split())
    konkani_conformer.resolve(args)
    assert tuple(getattr(args, name) for name in SHAPE) == GUIDE[command]
    assert (args.mixed_precision, args.device) == ("auto", "cuda")
    assert args.resume == "checkpoints/checkpoint_epoch_15.pt"


def test_the_guides_defaults():
    """Its optimized script: micro-batch 2, accumulation 4, 192 dimensions, 8 + 4 layers, cache
    cleared every 50."""
    args = make_parser(konkani_conformer).parse_args([])
    assert (args.batch_size, args.gradient_accumulation_steps, args.empty_cache_every) == (2, 4, 50)
    shape = konkani_conformer.choose_config(args, None)
    assert (shape["d_model"], shape["encoder_layers"], shape["decoder_layers"]) == (192, 8, 4)


# --- every recipe ---------------------------------------------------------------------------------


def tables(recipe) -> tuple[list, list]:
    """The rows of flags that exclude each other and of flags that need another."""
    args = make_parser(recipe).parse_args([])
    return options.all_excludes(args), args.rules.needs


def least(kind) -> str:
    """A value that an argparse type accepts."""
    for text in ("1", "8", "500", "99999", "en"):
        with contextlib.suppress(argparse.ArgumentTypeError):
            (kind or str)(text)
            return text
    raise AssertionError(kind)


def words(parser, flag: str) -> list[str]:
    """The words of a command that turn on a flag of the tables: "flag", or "flag value"."""
    name, _, value = flag.partition(" ")
    action = parser._option_string_actions[f"--{name}"]
    if isinstance(action, options.OnOff):
        return [options.shown(flag)]
    usual = action.choices[-1] if isinstance(action.choices, (list, tuple)) else least(action.type)
    return [f"--{name}", *[value or usual] * (action.nargs if isinstance(action.nargs, int) else 1)]


def without(parser, flags: tuple[str, ...]) -> list[str]:
    """The words that turn off those of `flags`, "flag value", that are on by default. Some may be
    other recipes' flags."""
    for name, _, value in (flag.partition(" ") for flag in flags):
        action = parser._option_string_actions.get(f"--{name}")
        if value and action.default == value:
            other = next(each for each in action.choices if f"{name} {each}" not in flags)
            return [f"--{name}", other]
    return []


def refusal(recipe, command: list[str]) -> str:
    args = make_parser(recipe).parse_args(command)
    with pytest.raises(UsageError) as error:
        recipe.resolve(args)
    assert error.value.status == 2 and "\n" not in str(error.value)
    return str(error.value)


@RECIPES
def test_flags_that_exclude_each_other(recipe):
    parser = make_parser(recipe)
    excludes, _ = tables(recipe)
    assert len(excludes) > len(options.EXCLUDES)
    for flag, other, _ in excludes:
        names = {f"--{each.split()[0]}" for each in (flag, other)}
        if not names <= parser._option_string_actions.keys():
            # A row may be for other recipes that share it.
            assert names <= EVERY, names
            continue
        message = refusal(recipe, [*words(parser, flag), *words(parser, other)])
        assert options.shown(flag) in message and options.shown(other) in message, (flag, other)


@RECIPES
def test_a_command_that_reads_no_manifest_takes_none(recipe):
    parser = make_parser(recipe)
    excludes, _ = tables(recipe)
    rows = {(flag, other) for flag, other, _ in excludes}
    for command in {"transcribe", "align", "synthesize"} & parser.rules.commands.keys():
        for flag in ("train_manifest", "val_manifest", "test_manifest"):
            assert (flag, command) in rows


@RECIPES
def test_flags_that_need_another(recipe):
    parser = make_parser(recipe)
    _, needs = tables(recipe)
    assert needs
    for flag, others, reason in needs:
        message = refusal(recipe, [*words(parser, flag), *without(parser, others)])
        assert options.shown(flag) in message and message.endswith(reason), flag
        assert any(options.shown(other) in message for other in others), flag


def test_the_demo_and_other_data_last_as_long_as_the_recipe_says():
    def lengths(command: str) -> tuple:
        args = make_parser(konkani_conformer).parse_args(command.split())
        konkani_conformer.resolve(args)
        return args.max_steps, args.num_epochs, args.eval_every, args.spec_augment

    steps = konkani_conformer.DEMO_STEPS
    assert lengths("") == (steps, None, steps // 6, False)
    # What is not given follows the data: tests/common/test_run_length.py.
    assert lengths("--train_manifest a.json") == (None, None, None, True)
    given = lengths("--train_manifest a.json --max_steps 5 --eval_every 2 --no_spec_augment")
    assert given == (5, None, 2, False)
    assert lengths("--num_epochs 3")[:2] == (None, 3)


UNKNOWN = (
    "error: unrecognized arguments: --batchsize 1; did you mean --batch_size? (--help all lists"
    " every flag)\n"
)


@RECIPES
def test_an_unknown_flag_is_one_line(recipe):
    """From another folder: status 2, nothing on stdout."""
    process = processes.start([recipe.__file__, "--batchsize", "1"], "/")
    assert process.communicate() == ("", UNKNOWN) and process.returncode == 2
