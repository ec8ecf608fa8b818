"""Flags: the seed guide's commands mean what they meant; mistakes are one line and exit status 2."""

import argparse
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from common import errors, options
from common.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes/konkani_conformer.py"


@pytest.fixture(scope="module")
def recipe():
    """The recipe's module; importing it starts nothing."""
    spec = importlib.util.spec_from_file_location("konkani_conformer_for_options", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def parser(recipe):
    parser = options.Parser(recipe.__doc__)
    options.add_shared_arguments(parser)
    recipe.add_arguments(parser)
    return parser


def refused(parser, capsys, *arguments) -> str:
    """The one line on stderr that refuses the arguments."""
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: ")
    return err


# --- the seed guide --------------------------------------------------------------------------------------------------

RESUME = "--resume checkpoints/checkpoint_epoch_15.pt"
GUIDE = {
    f"--batch_size 1 --gradient_accumulation_steps 8 --mixed_precision --device cuda --d_model 192 --encoder_layers 8 --decoder_layers 4 {RESUME}":
        {"batch_size": 1, "gradient_accumulation_steps": 8, "d_model": 192, "encoder_layers": 8, "decoder_layers": 4},
    f"--batch_size 2 --gradient_accumulation_steps 4 --mixed_precision --device cuda --d_model 128 --encoder_layers 6 --decoder_layers 3 {RESUME}":
        {"batch_size": 2, "gradient_accumulation_steps": 4, "d_model": 128, "encoder_layers": 6, "decoder_layers": 3},
    f"--batch_size 1 --gradient_accumulation_steps 8 --mixed_precision --device cuda {RESUME}":
        {"batch_size": 1, "gradient_accumulation_steps": 8, "d_model": None},
}  # fmt: skip


@pytest.mark.parametrize("command", GUIDE)
def test_the_seed_guides_commands(parser, command):
    args = parser.parse_args(shlex.split(command))
    expected = {
        "mixed_precision": "auto", "device": "cuda", "resume": "checkpoints/checkpoint_epoch_15.pt", **GUIDE[command]
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected


def test_the_seed_guides_defaults(parser, recipe):
    """Its optimized script: micro-batch 2, accumulation 4, 192 dimensions, 8 + 4 layers, cache cleared every 50."""
    args = parser.parse_args([])
    assert (args.batch_size, args.gradient_accumulation_steps, args.empty_cache_every) == (2, 4, 50)
    options.resolve_shape(args, recipe.SHAPE, None)
    assert (args.d_model, args.encoder_layers, args.decoder_layers) == (192, 8, 4)


# --- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("", "auto"), ("--mixed_precision", "auto"), ("--mixed_precision auto", "auto"), ("--mixed_precision fp16", "fp16"),
        ("--mixed_precision=bf16", "bf16"), ("--mixed_precision --batch_size 3", "auto"), ("--no_mixed_precision", "no"),
        ("--bf16", "bf16"), ("--mixed_precision fp16 --no_mixed_precision", "no"), ("--no_mixed_precision --bf16", "bf16"),
        ("--bf16 --mixed_precision", "auto"),
    ],
)  # fmt: skip
def test_mixed_precision(parser, arguments, expected):
    assert parser.parse_args(arguments.split()).mixed_precision == expected


def test_every_switch_has_its_opposite(parser):
    switches = [action for action in parser._actions if isinstance(action, options.OnOff)]
    assert {"gradient_checkpointing", "deterministic", "persistent_workers", "tf32", "spec_augment"} <= {
        a.dest for a in switches
    }
    for action in switches:
        name = action.dest
        assert getattr(parser.parse_args([f"--{name}"]), name) is True
        assert getattr(parser.parse_args([f"--no_{name}"]), name) is False
        assert getattr(parser.parse_args([f"--no_{name}", f"--{name}"]), name) is True


def test_help_shows_every_flag_and_its_default(parser):
    text = parser.format_help()
    for action in parser._actions:
        assert action.option_strings[0] in text and action.help
        # A default in the help that is not the default is worse than none. Those of None are said in words.
        if action.default is not None and action.dest != "help":
            shown = {True: "on", False: "off"}[action.default] if isinstance(action.default, bool) else action.default
            tail = action.help.rpartition("(")[2].removesuffix(")")
            assert tail == shown or float(tail) == shown, action.dest


def test_a_recipes_own_defaults_replace_the_shared_ones_in_the_help_too():
    parser = options.Parser("")
    options.add_shared_arguments(parser, learning_rate=3e-5, tf32=False, mixed_precision="bf16", max_steps=7)
    args = parser.parse_args([])
    assert (args.learning_rate, args.tf32, args.mixed_precision, args.max_steps) == (3e-5, False, "bf16", 7)
    assert parser.parse_args(["--learning_rate", "1"]).learning_rate == 1
    text = parser.format_help()
    assert "peak learning rate (3e-05)" in text and "TF32 for what stays in fp32 on CUDA (off)" in text
    with pytest.raises(KeyError):
        options.add_shared_arguments(options.Parser(""), learning_rte=1)


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, hint",
    [
        ("--batchsize 1", "--batch_size"), ("--batch-size 1", "--batch_size"), ("--batchsize=1", "--batch_size"),
        ("--num_workers 2", "--dataloader_num_workers"), ("--epochs 3", "--num_epochs"), ("--lr 1e-3", "--learning_rate"),
        ("--fp16", "--mixed_precision fp16"), ("--fp32", "--no_mixed_precision"), ("--no-mixed-precision", "--no_mixed_precision"),
        ("--checkpoint checkpoints", "--checkpoint_dir"), ("--gradient_accumulation 4", "--gradient_accumulation_steps"),
        # Abbreviations, which argparse would take by itself.
        ("--batch 1", "--batch_size"), ("--resum a.pt", "--resume"), ("--mixed", "--mixed_precision"),
    ],
)  # fmt: skip
def test_an_unknown_flag_is_refused_with_the_nearest(parser, capsys, arguments, hint):
    line = refused(parser, capsys, *arguments.split())
    assert f"did you mean {hint}?" in line and arguments.split("=")[0].split()[0] in line


def test_an_unknown_flag_unlike_any_other_gets_no_hint(parser, capsys):
    assert "did you mean" not in refused(parser, capsys, "--xyzzy")


@pytest.mark.parametrize("arguments", ["--strict_data true", "--gradient_checkpointing 1", "train.json"])
def test_a_stray_word(parser, capsys, arguments):
    line = refused(parser, capsys, *arguments.split())
    assert arguments.split()[-1] in line and "on/off flags take no value" in line


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ("--batch_size 0", "at least 1"), ("--batch_size -2", "at least 1"), ("--batch_size 1.5", "not a whole number"),
        ("--batch_size two", "not a whole number"), ("--batch_size 1e30", "not a whole number"),
        ("--batch_size 99999999999999999999", "at most 2147483647"), ("--seed -1", "at least 0"),
        ("--seed 99999999999999999999", "at most"), ("--learning_rate nan", "not a number"),
        ("--learning_rate inf", "not a number"), ("--learning_rate -1", "more than 0"), ("--learning_rate 0", "more than 0"),
        ("--learning_rate 1e-3x", "not a number"), ("--max_grad_norm -0.1", "at least 0"), ("--dropout 1.1", "at most 1"),
        ("--dropout -0.1", "at least 0"), ("--max_duration 0", "more than 0"), ("--gradient_accumulation_steps 0", "at least 1"),
        ("--dataloader_num_workers -1", "at least 0"), ("--dataloader_num_workers many", "not a whole number"),
        ("--keep_last 0", "at least 1"), ("--empty_cache_every -1", "at least 0"), ("--subsampling 3", "invalid choice"),
        ("--lr_schedule linear", "inverse_sqrt"), ("--mixed_precision fp8", "'fp16'"), ("--resume", "expected one argument"),
        ("--strict_data=true", "ignored explicit argument"),
    ],
)  # fmt: skip
def test_values_out_of_range(parser, capsys, arguments, reason):
    line = refused(parser, capsys, *arguments.split())
    assert reason.strip("'") in line and f"argument {arguments.split('=')[0].split()[0]}" in line


@pytest.mark.parametrize("flag", ["--resume", "--init_from", "--train_manifest", "--output_dir", "--checkpoint_dir"])
def test_an_empty_path_is_refused(parser, capsys, flag):
    assert "the path is empty" in refused(parser, capsys, flag, "")


def test_zero_where_zero_means_something(parser):
    arguments = "--dataloader_num_workers 0 --empty_cache_every 0 --save_every 0 --eval_every 0 --max_grad_norm 0 --dropout 0 --seed 0 --weight_decay 0 --warmup_steps 0 --early_stopping_patience 0".split()
    args = parser.parse_args(arguments)
    assert all(getattr(args, flag.removeprefix("--")) == 0 for flag in arguments[::2])


# --- what depends on several flags -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--resume a.pt --init_from b.pt", ["--resume", "--init_from"]),
        ("--val_manifest val.json", ["--val_manifest", "--train_manifest"]),
        ("--min_duration 5 --max_duration 5", ["--min_duration 5", "--max_duration 5"]),
        ("--deterministic --cudnn_benchmark", ["--deterministic", "--cudnn_benchmark"]),
    ],
)
def test_contradictions(parser, arguments, words):
    with pytest.raises(UsageError) as failure:
        options.resolve(parser.parse_args(arguments.split()), 1200)
    assert all(word in str(failure.value) for word in words) and failure.value.status == 2


def test_resolve(parser):
    def resolved(arguments):
        args = parser.parse_args(arguments.split())
        options.resolve(args, 1200)
        return args

    demo = resolved("")
    assert (demo.max_steps, demo.num_epochs, demo.eval_every) == (1200, None, 200)
    assert (demo.checkpoint_dir, demo.log_dir) == (Path("checkpoints"), Path("logs"))
    own = resolved("--train_manifest a.json --output_dir out --log_dir elsewhere")
    assert (own.max_steps, own.num_epochs, own.eval_every) == (None, 100, 0)
    assert (own.checkpoint_dir, own.log_dir) == (Path("out/checkpoints"), Path("elsewhere"))
    steps = resolved("--train_manifest a.json --max_steps 5 --eval_every 2")
    assert (steps.max_steps, steps.num_epochs, steps.eval_every) == (5, None, 2)
    assert resolved("--num_epochs 3").max_steps is None


def test_resolve_workers(capsys, monkeypatch):
    monkeypatch.setattr(options.os, "sched_getaffinity", lambda _: range(6), raising=False)
    for wanted, on_cpu, expected in (("auto", True, 1), ("auto", False, 4), (0, False, 0), (7, True, 7)):
        args = argparse.Namespace(dataloader_num_workers=wanted)
        options.resolve_workers(args, on_cpu)
        assert args.dataloader_num_workers == expected
        assert ("auto: 6 cores" in capsys.readouterr().out) == (wanted == "auto")


def test_resolve_shape():
    defaults, saved = {"d_model": 192, "cmvn": "global"}, {"d_model": 128, "cmvn": "utterance", "vocabulary": 30}

    def resolved(saved, **given):
        args = argparse.Namespace(**{**dict.fromkeys(defaults), **given})
        options.resolve_shape(args, defaults, saved)
        return vars(args)

    assert resolved(None) == defaults
    assert resolved(None, d_model=64) == {"d_model": 64, "cmvn": "global"}
    assert resolved(saved) == resolved(saved, d_model=128) == {"d_model": 128, "cmvn": "utterance"}
    with pytest.raises(UsageError, match=r"--d_model 192 conflicts with the checkpoint, which has 128.*--init_from"):
        resolved(saved, d_model=192)


# --- how a program ends ----------------------------------------------------------------------------------------------


def program(body: str, *arguments, **extra) -> subprocess.CompletedProcess:
    """Runs `body` as the `main` of a script."""
    text = f"from common.errors import *\ndef main():\n    {body}\nexit_with_one_line(main)"
    return subprocess.run([sys.executable, *arguments, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=60, **extra)  # fmt: skip


@pytest.mark.parametrize(
    "body, status, line",
    [
        ("raise DataError('a.wav is empty')", 1, "error: a.wav is empty\n"),
        ("raise RunError('the disk is full')", 1, "error: the disk is full\n"),
        ("raise UsageError('give one of them')", 2, "error: give one of them\n"),
        ("raise Stopped('stopped by SIGTERM', 143)", 143, "stopped by SIGTERM\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("require('not_there', 'the plot')", 1, "error: the plot needs the package not_there (No module named 'not_there'): pip install not_there\n"),
    ],
)  # fmt: skip
def test_failures_are_one_line(body, status, line):
    result = program(body)
    assert (result.returncode, result.stdout, result.stderr) == (status, "", line)


def test_a_defect_keeps_its_traceback():
    result = program("{}['x']")
    assert result.returncode == 1 and "Traceback" in result.stderr and "KeyError" in result.stderr


@pytest.mark.parametrize("flags", [[], ["-u"]])
def test_a_reader_that_left_ends_the_program_quietly(flags):
    """`... --transcribe folder | head -n 1`, buffered or not, whenever the reader leaves."""
    for count in (1, 100_000):
        text = f"from common.errors import *\ndef main():\n    import sys; sys.stdin.read()\n    for i in range({count}): print(i)\nexit_with_one_line(main)"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", text], cwd=ROOT, env={"PYTHONUNBUFFERED": ""}, **pipes
        )
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b"" and process.wait(60) == 141
        process.stderr.close()


def test_another_broken_pipe_is_no_success():
    result = program("import os; a, b = os.pipe(); os.close(a); os.write(b, b'x')")
    assert result.returncode == 1 and "BrokenPipeError" in result.stderr


def test_a_locale_without_devanagari_escapes_it():
    result = program("print('हांव')", env={"PYTHONIOENCODING": "latin-1", "PATH": ""})
    assert result.returncode == 0 and result.stdout == "\\u0939\\u093e\\u0902\\u0935\n"


def test_statuses():
    assert [kind("").status for kind in (errors.UsageError, errors.DataError, errors.RunError)] == [2, 1, 1]


def test_the_program_itself():
    """The recipe as a user runs it, from another folder: one line, status 2, nothing on stdout."""
    command = [sys.executable, str(RECIPE), "--batchsize", "1"]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "error: unrecognized arguments: --batchsize 1; did you mean --batch_size? (--help lists every flag)\n"  # fmt: skip
