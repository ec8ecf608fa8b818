"""The shared flags: their values, which were given, which contradict. Mistakes are one line and
exit status 2."""

import argparse
import dataclasses
import re

import pytest

from common import options
from common.errors import UsageError
from common.options import flag


@pytest.fixture
def parser():
    """The shared flags and one of a recipe."""
    made = options.Parser("a test")
    made.add_argument(
        "--dropout", type=options.SHARE, default=0.1, metavar="P", help="in every layer (0.1)"
    )
    options.add_arguments(made)
    return made


def refused(parser, capsys, *words) -> str:
    """The one line on stderr that refuses the words of a command."""
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(words)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: ")
    return err


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command, precision, level",
    [
        ("", "auto", None),
        ("--mixed_precision --use_cpu_offload --batch_size 3", "auto", "states"),
        ("--no_mixed_precision --use_cpu_offload=gradients", "no", "gradients"),
        ("--no_mixed_precision --bf16", "bf16", None),
        ("--bf16 --mixed_precision", "auto", None),
        ("--no_use_cpu_offload --use_cpu_offload", "auto", "states"),
    ],
)
def test_switches_that_may_have_a_word(parser, command, precision, level):
    args = parser.parse_args(command.split())
    assert (args.mixed_precision, args.use_cpu_offload) == (precision, level)


def test_help_shows_every_flag_and_its_default(parser):
    text = parser.format_help()
    for action in parser._actions:
        assert action.option_strings[0] in text and action.help
        # A wrong default in the help is worse than none. A default of None is explained in words.
        # Commands are off unless they are given.
        if action.default is None or action.dest in ("help", "evaluate", "verify_gpu"):
            continue
        shown = action.default
        if isinstance(shown, bool):
            shown = "on" if shown else "off"
        tail = action.help.rpartition("(")[2].removesuffix(")")
        assert tail == shown or float(tail) == shown, action.dest


def printed(parser, capsys, *words) -> str:
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(words)
    out, err = capsys.readouterr()
    assert stop.value.code == 0 and not err
    return out


USUAL = (  # of the shared flags
    "batch_size gradient_accumulation_steps num_epochs max_steps learning_rate device"
    " mixed_precision gradient_checkpointing optimizer use_cpu_offload dry_run evaluate output_dir"
    " resume init_from"
).split()


def test_the_short_help_has_the_usual_flags(parser, capsys):
    whole = printed(parser, capsys, "--help", "all")
    assert whole == parser.format_help()
    parser.usual("dropout")
    short = printed(parser, capsys, "--help")
    assert short == printed(parser, capsys, "-h", "--batch_size", "2")
    listed = set(re.findall(r"^  --(\w+)", short, re.MULTILINE))
    assert listed == {*USUAL, "dropout"}
    assert "\nmemory and speed:\n" in short
    assert short.endswith(f"\n--help all shows all {len(parser._actions) - 1} flags.\n")
    assert printed(parser, capsys, "--help", "all") == whole
    assert "invalid choice: 'most'" in refused(parser, capsys, "--help", "most")
    with pytest.raises(KeyError):
        parser.usual("learning_rte")


def test_what_a_recipe_changes_of_a_record():
    record = dataclasses.make_dataclass(
        "Record", [(name, int, flag(int, 3, "N", f"{name} (3)")) for name in "abcd"]
    )
    parser = options.Parser("")
    changes = {"a": 4, "b": (None, "by size"), "c": options.LEAVE_OUT, "d": {"choices": [3, 5]}}
    options.add_record(parser, "more", record, **changes)
    args = parser.parse_args([])
    assert (args.a, args.b, args.d, "c" in vars(args)) == (4, None, 3, False)
    assert [action.help for action in parser._actions[1:]] == ["a (4)", "b (by size)", "d (3)"]
    assert options.read_record(record, args).c == 3


def test_a_recipes_own_defaults_replace_the_shared_ones_in_the_help_too():
    parser = options.Parser("")
    own = {"learning_rate": 3e-5, "tf32": False, "mixed_precision": "bf16", "max_steps": 7}
    options.add_arguments(parser, **own, save_every=(None, "by size"))
    args = parser.parse_args([])
    assert {name: getattr(args, name) for name in own} == own
    assert args.save_every is None and args.given == set()
    assert parser.parse_args(["--learning_rate", "1"]).learning_rate == 1
    text = " ".join(parser.format_help().split())
    for part in (
        "peak learning rate (3e-05)",
        "use TF32 for fp32 operations on CUDA (off)",
        "20 minutes apart at most; 0 = only at the end and on signals (by size)",
    ):
        assert part in text
    with pytest.raises(KeyError):
        options.add_arguments(options.Parser(""), learning_rte=1)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command, hint",
    [
        ("--batchsize 1", "--batch_size"),
        ("--num_workers 2", "--dataloader_num_workers"),
        ("--enable_mixed_precision=False", "--no_mixed_precision"),
        ("--no-mixed-precision", "--no_mixed_precision"),
        # Abbreviations, which argparse accepts by default.
        ("--batch 1", "--batch_size"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest(parser, capsys, command, hint):
    line = refused(parser, capsys, *command.split())
    assert f"did you mean {hint}?" in line and command.split("=")[0].split()[0] in line


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--device_map=auto"], "; one device is used ("),  # as a recipe explains it
        (["--init_from", __file__, __file__], "a pattern of files needs quotes"),
        ([""], "a variable of the shell that is not set, or a space behind the backslash"),
        (["--xyzzy"], "unrecognized arguments: --xyzzy (--help all"),
        (["--tf32", "true"], "on/off flags take no value"),
        (["--tf32=True"], "on/off flags take no value"),
        (["--no_use_cpu_offload", "weights"], "--no_use_cpu_offload takes no word"),
        (["--resume", "my", "tapes/run"], "a name with spaces needs quotes"),
        (["--bf16", "auto", "base"], "TIER and SIZE stand before all flags"),
        (["—batch_size", "1"], "write two hyphens: --batch_size"),
        (["--resume", ""], "the path is empty"),
    ],
)
def test_a_word_that_is_wrong_is_explained(parser, capsys, words, hint):
    parser.hints["--device_map"] = "one device is used"
    line = refused(parser, capsys, *words)
    assert hint in line and "did you mean" not in line


@pytest.mark.parametrize(
    "command, reason",
    [
        ("--batch_size 0", "at least 1"),
        ("--batch_size 1.5", "not a whole number"),
        ("--batch_size 99999999999999999999", "at most 2147483647"),
        ("--learning_rate nan", "not a number"),
        ("--learning_rate 0", "more than 0"),
        ("--dropout 1.1", "at most 1"),
        ("--optimizer sgd", "invalid choice"),
        ("--mixed_precision fp8", "fp16"),
        ("--resume", "expected one argument"),
        ("--tf32=true", "ignored explicit argument"),
    ],
)
def test_values_out_of_range(parser, capsys, command, reason):
    line = refused(parser, capsys, *command.split())
    assert reason in line and f"argument {command.split('=')[0].split()[0]}" in line


# --- flags that contradict ------------------------------------------------------------------------


def resolved(parser, *command: str, **settings) -> argparse.Namespace:
    args = parser.parse_args(command)
    options.resolve(args, **{"is_demo": False, "demo_steps": 1200, **settings})
    return args


def refusal(parser, *command: str, **settings) -> str:
    with pytest.raises(UsageError) as error:
        resolved(parser, *command, **settings)
    assert error.value.status == 2 and "\n" not in str(error.value)
    return str(error.value)


COMMANDS = {"dry_run": True, "verify_gpu": True, "evaluate": False}  # {name: takes training flags}


def test_a_command_of_a_recipe_is_marked_by_the_parser(parser):
    flags = {
        "transcribe": flag(None, None, "PATH", "", options.ALONE, nargs="+"),
        "check_data": flag(options.OnOff, False, None, "", options.BESIDE),
        "smoothing": flag(float, 0.0, "X", "", options.TRAINS),
    }
    rows = [(name, object, declared) for name, declared in flags.items()]
    options.add_record(parser, "more", dataclasses.make_dataclass("More", rows))
    assert resolved(parser).rules.commands == {**COMMANDS, "transcribe": False, "check_data": True}
    resolved(parser, "--check_data", "--batch_size", "2")
    for words_of in ("--transcribe a --check_data", "--transcribe a --evaluate"):
        assert refusal(parser, *words_of.split()).endswith(": give one of them")
    assert refusal(parser, "--dry_run", "--check_data").endswith(": give one of them")
    message = refusal(parser, "--batch_size", "2", "--transcribe", "a")
    trains = "the first is for training; leave it out"
    assert message == f"--batch_size and --transcribe: {trains}"
    message = refusal(parser, "--smoothing", "0.2", "--evaluate")
    assert message == f"--smoothing and --evaluate: {trains}"
    resolved(parser, "--smoothing", "0.2", "--check_data")


def test_a_recipes_own_tables(parser):
    excludes = (("tf32 False", "dropout 0.5", "no reason"),)
    needs = (
        ("keep_last", ("save_every 5", "tf32 False"), "or it has no effect"),
        ("device cpu", ("evaluate",), ""),
    )
    parser.refuse(excludes, needs)
    message = refusal(parser, "--no_tf32", "--dropout", "0.5")
    assert message == "--no_tf32 and --dropout 0.5: no reason"
    resolved(parser, "--no_tf32", "--dropout", "0.4")
    message = refusal(parser, "--keep_last", "5")
    assert message == "--keep_last goes with --save_every 5 or --no_tf32: or it has no effect"
    for given in (
        "",
        "--keep_last 5 --save_every 5",
        "--keep_last 5 --no_tf32",
        "--device cuda",
        "--device cpu --evaluate",
    ):
        resolved(parser, *given.split())
    assert refusal(parser, "--device", "cpu") == "--device cpu goes with --evaluate"
    # The shared tables hold as well.
    assert "--init_from" in refusal(parser, "--resume", "a", "--init_from", "b")


# --- what depends on several flags ----------------------------------------------------------------


def test_resolve(parser):
    def lengths(command, **settings):
        args = resolved(parser, *command.split(), **settings)
        return args.max_steps, args.num_epochs, args.eval_every

    assert lengths("", is_demo=True) == (1200, None, 200)
    assert lengths("") == (None, None, None)
    assert lengths("--max_steps 5 --eval_every 2") == (5, None, 2)
    assert lengths("--num_epochs 3", is_demo=True) == (None, 3, 200)
    assert lengths("--num_epochs 3 --max_steps 9") == (9, 3, None)
    assert lengths("", usual_steps=4000, usual_eval_every=500) == (4000, None, 500)
    assert lengths("--eval_every 0", is_demo=True, usual_eval_every=500) == (1200, None, 0)
