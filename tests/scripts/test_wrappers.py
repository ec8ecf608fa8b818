"""The preset scripts as a user runs them. Their tables are read by `--print`. The Python
environment is tested in a copy of the project with a stub for the recipe, made-up requirements and
interpreters with made-up packages: no network."""

import functools
import http.server
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from benchmarks import tier_tables
from common import options

ROOT = Path(__file__).resolve().parents[2]
KONKANI = "run_training_memory_optimized.sh"
VIETNAMESE = "run_whisper_vietnamese.sh"
MORSE = "run_whisper_morse.sh"
PARAKEET = "run_parakeet_tdt.sh"
XTTS = "run_xtts_amharic.sh"
WEBUI = "run_webui.sh"
SCRIPTS = sorted(
    path.name for path in ROOT.glob("run_*.sh") if path.name not in ("run_tests.sh", WEBUI)
)
WHISPERS = [VIETNAMESE, MORSE]
WITH_DEMO = [VIETNAMESE, MORSE, PARAKEET, XTTS]
MODEL = ["--model_dir", str(ROOT)]  # resolving looks for the folder
DATA = ["--train_manifest", "train.json"]


@functools.cache
def read_rows(script: str) -> list[list[str]]:
    return tier_tables.read_rows(script)


TIERS = {script: tier_tables.names(read_rows(script), 0) for script in SCRIPTS}
SIZES = {script: tier_tables.names(read_rows(script), 1) for script in SCRIPTS}
ROWS = [(script, tier) for script in SCRIPTS for tier in TIERS[script]]
LEVELS = {"H": "states", "G": "gradients", "W": "weights"}
# The utterances of an update. Every tier has the same.
UPDATES = {
    KONKANI: {"minimal": 8, "optimized": 8, "original": 8},
    VIETNAMESE: {"demo": 16, **dict.fromkeys("tiny base small medium large turbo".split(), 24)},
    MORSE: {
        "demo": 24,
        "many": 256,
        **dict.fromkeys("tiny base small medium large turbo".split(), 96),
    },
    PARAKEET: {"demo": 8, "110m": 120, "0.6b": 120, "nemotron": 120},
    XTTS: {"demo": 16, "full": 240},
}


def first_line(text: str) -> str:
    return text.splitlines()[0]


@functools.cache
def answer_of(
    script: str, *arguments: str, gpus: str = "", **variables: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(ROOT / script), *arguments, "--print"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "GPUS": gpus, **variables},
        cwd="/",
    )


def command_of(script: str, *arguments: str, gpus: str = "") -> list[str]:
    """The flags that a script would start its recipe with."""
    result = answer_of(script, *arguments, gpus=gpus)
    assert result.returncode == 0, result.stderr
    launcher, _, flags = result.stdout.partition(".py ")
    if launcher.startswith("torchrun"):
        assert launcher.startswith(f"torchrun --standalone --nproc_per_node {gpus} {ROOT}/recipes/")
    else:
        assert launcher.startswith(f"python {ROOT}/recipes/")
    return flags.split()


def error_of(script: str, *arguments: str, gpus: str = "") -> str:
    """The message of a command line that is wrong."""
    return error_line(answer_of(script, *arguments, gpus=gpus), 2)


def error_line(result: subprocess.CompletedProcess, status: int) -> str:
    """The one line that starts with "error: ", which is the last of stderr."""
    assert result.returncode == status, (result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert result.stderr.rstrip().endswith(lines[0])
    return lines[0]


def name_of(script: str) -> str:
    """The name of a script's recipe."""
    return Path(shlex.split(answer_of(script, "cpu").stdout)[1]).stem


def recipe_of(script: str):
    return importlib.import_module(f"recipes.{name_of(script)}")


def resolved(script: str, words: list[str]):
    """The recipe's namespace for these flags."""
    recipe = recipe_of(script)
    parser = options.Parser("test")
    recipe.add_arguments(parser)
    args = parser.parse_args(words)
    recipe.resolve(args)
    return args


def row_of(script: str, tier: str, size: str) -> tuple[int, int, str] | None:
    """Micro-batch, accumulation and letters of a row, as `benchmarks` reads it, or None if the
    size does not fit in the tier."""
    batch, accumulation, *rest = tier_tables.row_of(read_rows(script), tier, size)[2:]
    if batch == "!":
        return None
    letters = itertools.takewhile(lambda word: not word.startswith("--"), rest)
    return int(batch), int(accumulation), "".join(letters)


def value(arguments: list[str], flag: str) -> str:
    """A flag's value as argparse would see it: the last one wins."""
    return arguments[len(arguments) - arguments[::-1].index(flag)]


def cut_of(words: list[str]) -> tuple[int, int]:
    """Micro-batch and accumulation steps."""
    return int(value(words, "--batch_size")), int(value(words, "--gradient_accumulation_steps"))


def update_of(words: list[str]) -> int:
    batch, accumulation = cut_of(words)
    return batch * accumulation


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_rows_name_every_tier_and_size(script):
    for command in ([str(ROOT / script)], ["sh", script], ["bash", script, "cpu"]):
        result = subprocess.run(
            [*command, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert result.returncode == 0 and not result.stderr
        assert f"./{script} [TIER] [SIZE]" in result.stdout
        assert f"GPUS=2 ./{script}" in result.stdout
        assert "BASH_VERSION" not in result.stdout
    words = set(re.findall(r"\w[\w.]*\b", result.stdout.partition("TIER: ")[2]))
    assert {*TIERS[script], *SIZES[script]} <= words


@pytest.mark.parametrize("script", SCRIPTS)
def test_wrong_words_are_usage_errors(script):
    for word in ("small", "T4", ""):
        tiers = ", ".join(TIERS[script])
        expected = f"error: no tier '{word}': it is one of auto, {tiers}; a size comes after it"
        assert error_of(script, word) == expected
    sizes = ", ".join(SIZES[script])
    assert error_of(script, "8gb", "huge") == f"error: no size 'huge': it is one of {sizes}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_using_a_model_brings_no_flags_of_training(script):
    uses = [
        ["--transcribe", "a.wav"],
        ["--evaluate"],
        ["--evaluate", "--test_manifest", "test.json"],
    ]
    if script == MORSE:
        uses.append(["--write_dataset", "d", "9"])
    if script == XTTS:
        speak = f"--synthesize selam --speaker_wav {__file__} {__file__} --output c.wav".split()
        uses = [speak, [*speak, *MODEL]]
    folder = []
    if script != KONKANI:
        folder = ["--output_dir", f"runs/{name_of(script)}"]
    for use in uses:
        on_cpu = ["--mixed_precision", "--device", "cpu", *folder, *use]
        assert command_of(script, "cpu", *use) == on_cpu
        with_size = command_of(script, "8gb", SIZES[script][-2], *use)
        assert with_size == ["--mixed_precision", *folder, *use]
        resolved(script, on_cpu)
    # These check the machine for a run, so they have the run's flags.
    for check in (["--verify_gpu"], ["--dry_run", "8GB"], ["--dry_run"]):
        assert command_of(script, "8gb", *check) == [*command_of(script, "8gb"), *check]
    assert resolved(script, command_of(script, "cpu", "--verify_gpu")).verify_gpu


@pytest.mark.parametrize("script", SCRIPTS)
def test_resume_is_added_unless_the_user_says_what_is_loaded(script):
    assert command_of(script, "8gb")[-2:] == ["--resume", "auto"]
    for given in (["--resume", "a.pt"], ["--resume=a.pt"], ["--init_from", "a.pt"]):
        words = command_of(script, "8gb", *given)
        assert words[-len(given) :] == given and "auto" not in words


# --- the rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "tier"), ROWS)
def test_every_row_has_the_update_of_its_size_and_is_understood(script, tier):
    model = [] if script == KONKANI else MODEL
    for size in SIZES[script]:
        row = row_of(script, tier, size)
        if size == "demo":
            words = command_of(script, tier, size)
        elif row is None:
            message = error_of(script, tier, size, *model)
            assert message.startswith(f"error: {size} does not fit in tier {tier}: take ")
            fitting = re.split(", or |, | or ", message.partition(": take ")[2])
            if fitting[-1] == "add --lora 32":  # with which this size fits, too
                fitting.pop()
                adapted = command_of(script, tier, size, *model, "--lora", "32")
                assert update_of(adapted) == UPDATES[script][size]
            assert fitting and all(row_of(script, tier, other) for other in fitting)
            continue
        else:
            words = command_of(script, tier, size, *model)
        batch, accumulation, letters = row
        assert cut_of(words) == (batch, accumulation)
        assert update_of(words) == UPDATES[script][size]
        args = resolved(script, words)
        assert (args.batch_size, args.gradient_accumulation_steps) == (batch, accumulation)
        assert args.gradient_checkpointing == ("R" in letters)
        assert args.optimizer == ("adamw_8bit" if "8" in letters else "adamw")
        levels = [level for letter, level in LEVELS.items() if letter in letters]
        assert [args.use_cpu_offload] == (levels or [None])
        assert getattr(args, "freeze_encoder", False) == ("F" in letters)
        assert args.device == ("cpu" if tier == "cpu" else "auto")
        assert (args.mixed_precision, args.resume) == ("auto", "auto")
        assert args.output_dir == ("." if script == KONKANI else f"runs/{name_of(script)}")
        if model and size != "demo":  # the model has its own size
            assert (args.from_scratch, args.model_size) == (False, None)


@pytest.mark.parametrize("script", WITH_DEMO)
def test_without_model_and_data_a_script_runs_the_recipes_own_demo_in_every_tier(script):
    recipe = recipe_of(script)
    plain = resolved(script, ["--from_scratch"] if script == XTTS else [])
    for words in [[], *([tier] for tier in TIERS[script]), ["auto", "demo"], ["8gb", "demo"]]:
        found = command_of(script, *words)
        args = resolved(script, found)
        assert (args.model_size, args.max_steps) == ("demo", recipe.DEMO_STEPS)
        assert update_of(found) == UPDATES[script]["demo"]
        assert args.warmup_steps is args.learning_rate is None
        assert "--max_target_tokens" not in found
        assert (args.eval_every, args.save_every) == (plain.eval_every, plain.save_every)
        assert found[-2:] == ["--resume", "auto"]
    for given in (MODEL, DATA):
        assert "size demo has its own model and data" in error_of(script, "cpu", "demo", *given)


def test_konkanis_sizes_are_the_guides_in_every_tier():
    shapes = {"optimized": (192, 8, 4), "minimal": (128, 6, 3), "original": (256, 12, 6)}
    for tier, size in itertools.product(TIERS[KONKANI], shapes):
        args = resolved(KONKANI, command_of(KONKANI, tier, size))
        assert (args.d_model, args.encoder_layers, args.decoder_layers) == shapes[size]
        assert args.empty_cache_every == 50
    assert cut_of(command_of(KONKANI, "t4")) == (2, 4)
    assert command_of(KONKANI, "t4") == command_of(KONKANI, "t4", "optimized")


@pytest.mark.parametrize(
    ("script", "tier"), [(script, tier) for script in WHISPERS for tier in TIERS[script]]
)
def test_a_whisper_from_scratch_has_the_size_of_the_row(script, tier):
    for size in "tiny base small medium large turbo".split():
        row = row_of(script, tier, size)
        if row is None:
            continue
        if "F" in row[2]:
            message = error_of(script, tier, size)
            assert f"{size} fits in tier {tier} only with a frozen encoder" in message
        else:
            args = resolved(script, command_of(script, tier, size, *DATA))
            assert args.from_scratch
            assert args.model_size == {"large": "large-v3"}.get(size, size)


def test_vietnamese_defaults_are_the_guides():
    args = resolved(VIETNAMESE, command_of(VIETNAMESE, "8gb", *DATA))
    assert (args.model_size, args.from_scratch, args.learning_rate) == ("base", True, 1e-4)
    assert (args.warmup_steps, args.max_steps, args.lr_schedule) == (1000, 50_000, "cosine")
    assert (args.save_every, args.keep_last, args.max_target_tokens) == (1000, 5, 256)
    words = command_of(VIETNAMESE, "8gb", "tiny", *DATA, *MODEL, "--num_epochs", "3")
    args = resolved(VIETNAMESE, words)
    assert (args.num_epochs, args.max_steps) == (3, None)
    assert (args.learning_rate, args.warmup_steps) == (None, 1000)
    for word in ("small_data", "medium_data"):  # the guide's run is for much speech
        args = resolved(VIETNAMESE, command_of(VIETNAMESE, "8gb", word, *DATA))
        assert (args.warmup_steps, args.max_steps, args.eval_every) == (None, None, None)
        assert (args.learning_rate, args.max_target_tokens) == (1e-4, 256)


def test_morse_rows_are_the_guides():
    """Larger GPUs have data workers; `many` is small with larger updates."""
    for words, workers in {
        "16gb small": 6,
        "32gb small": 6,
        "32gb medium": 6,
        "32gb large": 6,
        "32gb many": 8,
        "8gb small": "auto",
    }.items():
        args = resolved(MORSE, command_of(MORSE, *words.split(), *MODEL))
        assert args.dataloader_num_workers == workers
    for tier in TIERS[MORSE]:
        words = command_of(MORSE, tier, "many", "--conditions", "wide")
        args = resolved(MORSE, words)
        assert args.model_size == "small" and args.conditions == ["wide"]
        assert words.count("--dataloader_num_workers") == (tier in ("16gb", "24gb", "32gb"))
    assert resolved(MORSE, command_of(MORSE, "24gb", "--conditions", "wide")).model_size == "small"


def test_a_parakeet_from_scratch_has_the_size_of_the_row():
    for tier, size in itertools.product(TIERS[PARAKEET], ("110m", "0.6b", "nemotron")):
        for given in ([], DATA, ["--from_scratch"]):
            words = command_of(PARAKEET, tier, size, *given)
            args = resolved(PARAKEET, words)
            assert args.from_scratch and args.model_size == size
        file = ["--model_file", __file__]
        assert not resolved(PARAKEET, command_of(PARAKEET, tier, size, *file)).from_scratch
        model = ["--model_dir", "model"]  # of unknown size
        for given in (model, DATA, ["--from_scratch"], [*model, *DATA]):
            default = command_of(PARAKEET, tier, *given)
            assert default == command_of(PARAKEET, tier, "0.6b", *given)
        # A small file has a small model.
        assert command_of(PARAKEET, tier, *file) == command_of(PARAKEET, tier, "110m", *file)
    for row, evaluated in {"8gb 0.6b": 4, "16gb 0.6b": 8, "24gb 0.6b": 10, "a100 110m": 10}.items():
        args = resolved(PARAKEET, command_of(PARAKEET, *row.split()))
        assert args.eval_batch_size == evaluated


@pytest.mark.parametrize("tier", TIERS[XTTS])
def test_only_from_scratch_asks_for_an_xtts_with_random_weights(tier):
    csv = ["--train_csv", "train.csv", "--eval_csv", "val.csv"]
    scratch = ["--from_scratch"]
    for given in (MODEL, [*MODEL, *DATA], [*MODEL, *csv], scratch, [*scratch, *DATA], csv):
        is_new = given[:1] == scratch
        words = command_of(XTTS, tier, "full", *given)
        assert words == command_of(XTTS, tier, *given)
        args = resolved(XTTS, words)
        assert args.from_scratch == is_new and ("--model_size" in words) == is_new
        assert args.model_size == "full" or not is_new
        assert args.early_stopping_patience is args.warmup_steps is None
        has_data = given[-2] in (DATA[0], "--eval_csv") if len(given) > 1 else False
        assert (args.num_epochs, args.max_steps) == (None, None if has_data else 200)


# --- how much speech there is ---------------------------------------------------------------------

TUNING = [script for script in SCRIPTS if script != KONKANI]


@pytest.mark.parametrize(
    ("script", "tier"), [(script, tier) for script, tier in ROWS if script != KONKANI]
)
def test_little_speech_has_smaller_updates_in_every_row(script, tier):
    for size in SIZES[script]:
        row = row_of(script, tier, size)
        if size == "demo" or row is None:
            continue
        whole = command_of(script, tier, size, "large_data", *MODEL)
        assert whole == command_of(script, tier, size, *MODEL) and cut_of(whole) == row[:2]
        for word, update in {"small_data": 16, "medium_data": 48}.items():
            words = command_of(script, tier, size, word, *MODEL)
            batch, accumulation = cut_of(words)
            assert batch * accumulation == min(update, row[0] * row[1])
            fitting = [n for n in range(1, row[0] + 1) if batch * accumulation % n == 0]
            assert batch == max(fitting)
            for flag in ("--batch_size", "--gradient_accumulation_steps"):
                words[words.index(flag) + 1] = value(whole, flag)
            assert words == whole


def test_the_word_for_the_data_stands_beside_tier_and_size():
    expected = command_of(PARAKEET, "8gb", "110m", "small_data", *MODEL)
    for words in ("8gb small_data 110m", "small_data 8gb 110m"):
        assert command_of(PARAKEET, *words.split(), *MODEL) == expected
    assert update_of(command_of(XTTS, "small_data", *MODEL)) == 16
    words = command_of(XTTS, "8gb", "small_data", *MODEL, gpus="4")
    assert cut_of(words) == (4, 1)
    mine = ["--batch_size", "5", "--gradient_accumulation_steps", "7"]
    assert cut_of(command_of(XTTS, "8gb", "small_data", *MODEL, *mine)) == (5, 7)
    assert "no size 'small_data'" in error_of(KONKANI, "8gb", "small_data")
    for script in TUNING:
        assert "small_data is for your own" in error_of(script, "8gb", "small_data")
        assert "the word 'c' is too much" in error_of(script, "a", "b", "c")
    assert "does not divide an update of 16" in error_of(
        XTTS, "8gb", "small_data", *MODEL, gpus="3"
    )


def write_manifest(path: Path, hours: float) -> Path:
    row = {"audio_filepath": "a.wav", "text": "a", "duration": 6.0}
    path.write_text((json.dumps(row) + "\n") * round(600 * hours), encoding="utf-8")
    return path


@pytest.mark.parametrize("script", TUNING)
@pytest.mark.parametrize(
    ("hours", "word", "told"),
    [(1.5, "small_data", "1.5 h"), (3, "medium_data", "3 h"), (30, "large_data", "20 or more h")],
)
def test_auto_is_the_hours_of_the_manifest(tmp_path, script, hours, word, told):
    flag = "--train_csv" if script == XTTS else "--train_manifest"
    manifest = write_manifest(tmp_path / "my train*.json", hours)
    given = [f"{flag}={manifest}"] if word == "medium_data" else [flag, str(manifest)]
    result = run_here(script, "16gb", *MODEL, *given)
    assert result.stderr == f"data: {word} (auto: {told} of speech)\n"
    by_hand = run_here(script, "16gb", word, *MODEL, *given)
    assert by_hand.stdout == result.stdout and not by_hand.stderr
    other = run_here(script, "16gb", "small_data", *MODEL, *given)
    assert (other.stdout == result.stdout) == (word == "small_data") and not other.stderr


def run_here(script: str, *words: str, **extra) -> subprocess.CompletedProcess:
    """With the interpreter of the tests."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [str(ROOT / script), *words, "--print"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, **extra},
    )


def test_morse_recordings_are_a_folder(tmp_path):
    rows = ["id,audio_file,text,duration", *(f"{n},a{n}.wav,CQ,20" for n in range(200))]
    (tmp_path / "metadata.csv").write_text("\n".join(rows))
    result = run_here(MORSE, "8gb", *MODEL, "--data_dir", str(tmp_path))
    assert result.stderr == "data: small_data (auto: 1.1 h of speech)\n"
    assert update_of(result.stdout.split()) == 16
    assert "--num_epochs" not in result.stdout
    words = command_of(MORSE, "8gb", "many", "--data_dir", "d")
    assert value(words, "--num_epochs") == "3" and update_of(words) == 256


def test_hours_that_are_not_known_are_many_and_nothing_is_installed(project, tmp_path):
    shutil.copy(ROOT / PARAKEET, project / PARAKEET)
    manifest = write_manifest(tmp_path / "train.json", 1)
    command = [str(project / PARAKEET), "8gb", *MODEL]
    result = run(project, "--train_manifest", str(manifest), "--print", command=command)
    assert result.returncode == 0 and not (project / ".venv").exists()
    assert result.stderr == (
        "data: large_data (auto: the hours of speech are not known before the packages are"
        " installed)\n"
    )
    manifest.write_text("no manifest")
    result = run_here(PARAKEET, "8gb", *MODEL, "--train_manifest", str(manifest))
    assert result.stderr == "data: large_data (auto: the hours of speech are not known)\n"
    assert update_of(result.stdout.split()) == 120
    # That the file is missing is the recipe's to say.
    assert not run_here(PARAKEET, "8gb", *MODEL, *DATA).stderr


# --- words inside of values -----------------------------------------------------------------------


def test_a_value_is_not_taken_for_a_flag_or_a_word(tmp_path):
    """Of a folder's name, of a pattern, and of a text."""
    (tmp_path / "a100").touch()
    for name in ("x --resume auto y", "--from_scratch --max_steps", "* "):
        alone = ["--resume", "a.pt", f"--export={name}"]
        result = run_here(PARAKEET, "8gb", *alone)
        assert "--batch_size" not in result.stdout, name
    result = run_here(PARAKEET, "8gb", "--export", "x --resume auto y", "--resume", "a.pt")
    assert "--batch_size" not in result.stdout
    for card in (["*"], ["8GB", "--init_from", "a100"], ["8", "GB", "--init_from", "a 24gb b"]):
        result = subprocess.run(
            [str(ROOT / PARAKEET), "--dry_run", *card, "--print"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        assert result.stderr == f"tier: {'cpu' if card == ['*'] else '8gb'} (auto)\n", card


# --- a user's flags -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "tier", "size", "other"),
    [
        (VIETNAMESE, "16gb", "turbo", "tiny"),
        (MORSE, "16gb", "turbo", "tiny"),
        (PARAKEET, "8gb", "0.6b", "110m"),
    ],
)
def test_a_users_flags_win_over_the_rows(script, tier, size, other):
    mine = ["--batch_size", "1", "--no_gradient_checkpointing"]
    args = resolved(script, command_of(script, tier, size, *MODEL, *mine))
    assert args.batch_size == 1 and not args.gradient_checkpointing
    assert args.optimizer == "adamw_8bit"
    # A user's option takes the place of the row's that it excludes.
    args = resolved(script, command_of(script, tier, size, *MODEL, "--use_cpu_offload"))
    assert args.optimizer == "adamw" and args.use_cpu_offload
    mine = [f"--model_size={other}", "--learning_rate=1e-3", "--output_dir", "elsewhere"]
    args = resolved(script, command_of(script, "cpu", *DATA, *mine))
    assert (args.model_size, args.learning_rate, args.output_dir) == (other, 1e-3, "elsewhere")
    assert "--model_size" not in command_of(script, "8gb", *DATA, "--resume", "a.pt")


@pytest.mark.parametrize(
    ("script", "words", "level"),
    [
        (VIETNAMESE, "4gb small", "states"),
        (MORSE, "8gb medium", "gradients"),
        (PARAKEET, "6gb 0.6b", "gradients"),
        (PARAKEET, "4gb 0.6b", "weights"),
        (XTTS, "4gb full", "weights"),
    ],
)
def test_a_users_optimizer_or_level_wins_over_a_rows_level(script, words, level):
    words = [*words.split(), *MODEL]
    assert resolved(script, command_of(script, *words)).use_cpu_offload == level
    for mine in (["--optimizer", "adamw_8bit"], ["--optimizer=adamw_8bit"]):
        args = resolved(script, command_of(script, *words, *mine))
        assert args.optimizer == "adamw_8bit" and args.use_cpu_offload is None
    args = resolved(script, command_of(script, *words, "--optimizer", "adamw"))
    assert args.optimizer == "adamw" and args.use_cpu_offload == level  # no contradiction
    for mine in (["--use_cpu_offload"], ["--use_cpu_offload", "states"]):
        assert resolved(script, command_of(script, *words, *mine)).use_cpu_offload == "states"
    args = resolved(script, command_of(script, *words, "--use_cpu_offload=weights"))
    assert args.use_cpu_offload == "weights" and args.optimizer == "adamw"


def test_xttss_flags_of_the_replaced_project_win_over_the_rows():
    mine = (
        "--train_csv t.csv --output_path there --grad_acumm 2 --batch_size 8 --num_epochs 10"
        " --enable_grad_checkpoint --enable_sdpa --enable_mixed_precision"
    )
    args = resolved(XTTS, command_of(XTTS, "16gb", "small_data", *MODEL, *mine.split()))
    assert (args.output_dir, args.gradient_accumulation_steps, args.batch_size) == ("there", 2, 8)
    assert (args.num_epochs, args.warmup_steps, args.mixed_precision) == (10, None, "auto")
    assert args.gradient_checkpointing and args.sdpa
    mine = ["--use_cpu_offload", "--no_gradient_checkpointing"]
    args = resolved(XTTS, command_of(XTTS, "8gb", *MODEL, *mine))
    assert args.optimizer == "adamw" and args.use_cpu_offload and not args.gradient_checkpointing
    mine = ["--optimizer", "adamw_8bit", "--no_sdpa", "--no_mixed_precision"]
    args = resolved(XTTS, command_of(XTTS, "16gb", *MODEL, *mine))
    assert args.optimizer == "adamw_8bit" and not args.sdpa and args.mixed_precision == "no"
    # A model that is resumed has its own shape and start.
    for given in (["--resume", "a.pt"], ["--from_scratch", "--resume", "a.pt"]):
        words = command_of(XTTS, "8gb", *given)
        assert words.count("--from_scratch") == given.count("--from_scratch")
        assert "--model_size" not in words
    words = command_of(XTTS, "8gb", *MODEL, *DATA, "--init_from", "a.pt")
    assert update_of(words) == 240 and not resolved(XTTS, words).from_scratch
    mine = ["--from_scratch", "--model_size", "demo"]
    assert resolved(XTTS, command_of(XTTS, "8gb", *mine)).model_size == "demo"


EXPORT = "--export d --resume best.safetensors"


@pytest.mark.parametrize("script", [PARAKEET, XTTS])
def test_an_export_alone_does_not_train(script):
    for tier in TIERS[script]:
        device = ["--device", "cpu"] if tier == "cpu" else []
        plain = ["--mixed_precision", *device, "--output_dir", f"runs/{name_of(script)}"]
        for use in (EXPORT.split(), ["--export", "d", *MODEL]):
            words = command_of(script, tier, *use)
            assert words == [*plain, *use]
            resolved(script, words)
    for goal in ("--train_manifest t.json", "--max_steps 9", "--from_scratch", "--num_epochs=2"):
        words = command_of(script, "8gb", *EXPORT.split(), *goal.split())
        assert "--batch_size" in words


# --- several GPUs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "tier"), ROWS)
def test_several_gpus_share_the_update_of_every_row(script, tier):
    for size in SIZES[script]:
        model = [] if size == "demo" or script == KONKANI else MODEL
        if row_of(script, tier, size) is None:
            continue
        one = command_of(script, tier, size, *model)
        for gpus in (2, 8):
            words = command_of(script, tier, size, *model, gpus=str(gpus))
            assert update_of(words) * gpus == update_of(one), (tier, size)
            assert cut_of(words)[0] <= cut_of(one)[0]
            for flag in ("--batch_size", "--gradient_accumulation_steps"):
                words[words.index(flag) + 1] = value(one, flag)
            assert words == one


@pytest.mark.parametrize(
    ("script", "words", "gpus", "cut"),
    [
        (KONKANI, "16gb", "2", (4, 1)),
        (KONKANI, "t4", "2", (2, 2)),
        (KONKANI, "t4", "8", (1, 1)),
        (VIETNAMESE, "8gb small", "4", (3, 2)),
        (VIETNAMESE, "16gb small", "3", (8, 1)),
        (MORSE, "24gb medium", "3", (4, 8)),
        (PARAKEET, "a100 0.6b", "2", (60, 1)),
        (PARAKEET, "24gb 0.6b", "4", (15, 2)),
        (PARAKEET, "8gb 0.6b", "2", (6, 10)),
        (PARAKEET, "8gb", "8", (1, 1)),
        (XTTS, "8gb full", "8", (15, 2)),
        (XTTS, "a100 --from_scratch", "2", (60, 2)),
    ],
)
def test_a_gpus_share_is_in_the_largest_micro_batches_that_divide_it(script, words, gpus, cut):
    result = answer_of(script, *words.split(), gpus=gpus)
    assert result.stdout.startswith("torchrun ") and not result.stderr
    assert cut_of(result.stdout.split()) == cut


def test_one_gpu_needs_no_torchrun():
    assert answer_of(KONKANI, "8gb", gpus="1").stdout == answer_of(KONKANI, "8gb").stdout
    assert answer_of(KONKANI, "8gb", gpus="1").stdout.startswith("python ")


@pytest.mark.parametrize("gpus", ["0", "-2", "two", "1.5", "08", "2 "])
def test_gpus_is_a_number(gpus):
    assert f"error: GPUS={gpus}: it must be the number" in error_of(KONKANI, "8gb", gpus=gpus)


def test_an_update_that_gpus_does_not_divide_is_a_usage_error_unless_the_user_cuts_it():
    message = error_of(KONKANI, "8gb", gpus="3")
    assert "GPUS=3 does not divide an update of 8: take 2, 4 or 8" in message
    assert error_of(KONKANI, "8gb", "--batch_size", "3", gpus="3") == message
    mine = ["--batch_size", "3", "--gradient_accumulation_steps=2"]
    words = command_of(KONKANI, "8gb", *mine, gpus="3")
    assert words[-3:] == mine
    assert cut_of(command_of(KONKANI, "8gb", "--batch_size", "4", gpus="2")) == (4, 1)


@pytest.mark.parametrize(
    ("script", "use"),
    [
        (KONKANI, "--evaluate"),
        (KONKANI, EXPORT),
        (MORSE, "--transcribe a.wav"),
        (MORSE, "--verify_gpu"),
        (MORSE, "--write_dataset d 9"),
        (VIETNAMESE, EXPORT),
        (PARAKEET, f"{EXPORT} --export_format nemo"),
        (XTTS, f"--export d --model_dir {ROOT}"),
        (XTTS, "--synthesize selam --speaker_wav a.wav"),
    ],
)
def test_what_does_not_train_runs_in_one_process(script, use):
    result = answer_of(script, "16gb", *use.split(), gpus="4")
    assert result.stdout == answer_of(script, "16gb", *use.split()).stdout
    assert result.stdout.startswith("python ")
    assert result.stderr == "GPUS=4 is ignored: this command runs in one process\n"


@pytest.mark.parametrize(
    ("script", "goal"),
    [
        (KONKANI, "--resume=best.pt --train_manifest train.json"),
        (MORSE, "--resume=best.pt --data_dir d"),
        (MORSE, "--resume auto"),
        (PARAKEET, "--resume=best.pt --train_manifest train.json"),
        (PARAKEET, "--resume best.pt --max_steps 9"),
        (XTTS, "--model_dir m --train_csv=t.csv"),
        (XTTS, "--model_dir m --resume=auto"),
    ],
)
def test_an_export_after_training_runs_on_all_gpus(script, goal):
    result = answer_of(script, "16gb", "--export", "d", *goal.split(), gpus="4")
    assert result.stdout.startswith("torchrun ") and not result.stderr


# --- several machines, shards, plans for several GPUs ---------------------------------------------

ONE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # for every start of the processes


def machine(number: str, gpus: str = "1") -> dict[str, str]:
    """What a user sets on one of two machines."""
    return {"NODES": "2", "NODE": number, "HEAD": "a.b:29500", "gpus": gpus}


@pytest.mark.parametrize(("gpus", "ranks"), [("", 2), ("1", 2), ("4", 8)])
def test_machines_share_an_update_and_meet_at_the_first(gpus, ranks):
    addresses = []
    for number in ("0", "1"):
        result = answer_of(PARAKEET, "24gb", "0.6b", "large_data", **machine(number, gpus))
        variable, torchrun, *words = shlex.split(result.stdout)
        assert (variable, torchrun) == (ONE_STORE, "torchrun") and not result.stderr
        assert value(words, "--nnodes") == "2" and value(words, "--nproc_per_node") == (gpus or "1")
        assert value(words, "--rdzv_endpoint") == "a.b:29500"
        assert value(words, "--rdzv_backend") == "c10d" and int(value(words, "--max_restarts"))
        settings = dict(each.split("=") for each in value(words, "--rdzv_conf").split(","))
        assert settings["is_host"] == ("1" if number == "0" else "0")
        assert update_of(words) * ranks == UPDATES[PARAKEET]["0.6b"]
        addresses.append(value(words, "--local_addr"))
    assert addresses[0] == "a.b"
    # torchrun sorts by these texts, and the first one's processes have the first ranks.
    assert addresses == sorted(addresses) and addresses[1] > "zz.b"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NODES": "two"}, "NODES=two: it must be the number of machines"),
        ({"NODES": "2"}, "NODES=2 NODE=: NODE must be this machine's number, 0 to 1"),
        ({"NODES": "2", "NODE": "2"}, "NODES=2 NODE=2: NODE must be this machine's number"),
        ({"NODES": "2", "NODE": "1"}, "HEAD=: it must be the address of machine 0 and a free port"),
        (machine("1") | {"HEAD": "a.b"}, "HEAD=a.b: it must be the address of machine 0 and a"),
        (machine("1", "3"), "NODES=2 GPUS=3 does not divide an update of 8"),
    ],
)
def test_a_wrong_machine_is_a_usage_error(variables, message):
    assert message in error_line(answer_of(KONKANI, "8gb", **variables), 2)


def test_more_gpus_than_divide_an_update_get_a_larger_one():
    for flags in ([], ["--dry_run", "a100"]):  # a plan is that of the run
        result = answer_of(PARAKEET, "a100", "0.6b", "large_data", *flags, **machine("1", "8"))
        assert 16 * update_of(result.stdout.split()) == 128
        assert "update: 128 utterances, because 16 GPUs do not divide 120" in result.stderr
    result = answer_of(PARAKEET, "a100", "demo", **machine("0", "8"))
    assert cut_of(result.stdout.split()) == (1, 1)
    assert not answer_of(XTTS, "a100", "full", "large_data", *MODEL, **machine("0", "8")).stderr


def test_what_does_not_train_runs_in_one_process_on_every_machine():
    result = answer_of(KONKANI, "8gb", "--evaluate", **machine("1", "4"))
    assert result.stdout == answer_of(KONKANI, "8gb", "--evaluate").stdout
    assert result.stderr == "NODES=2 GPUS=4 is ignored: this command runs in one process\n"


def test_one_machine_starts_a_sharded_run_anew_and_others_as_ever():
    plain = answer_of(KONKANI, "8gb", gpus="2").stdout
    assert plain.startswith(f"torchrun --standalone --nproc_per_node 2 {ROOT}/recipes/")
    assert answer_of(KONKANI, "8gb", gpus="2", NODES="1").stdout == plain
    variable, torchrun, *words = answer_of(KONKANI, "8gb", "--sharded", gpus="2").stdout.split()
    assert (variable, torchrun) == (ONE_STORE, "torchrun") and "--standalone" in words
    assert int(value(words, "--max_restarts")) and words[-1] == "--sharded"
    assert answer_of(KONKANI, "8gb", "--sharded").stdout.startswith("python ")


@pytest.mark.parametrize("script", SCRIPTS)
def test_sharded_excludes_nothing_of_a_row(script):
    for tier, size in itertools.product(TIERS[script], SIZES[script]):
        row = row_of(script, tier, size)
        if row and set("8HGW") & set(row[2]):
            words = command_of(script, tier, size, *MODEL, "--sharded")
            args = resolved(script, words)
            assert (args.optimizer, args.use_cpu_offload) == ("adamw", None)
            assert args.gradient_checkpointing == ("R" in row[2])


@pytest.mark.parametrize("script", WHISPERS)
def test_a_whole_large_model_is_sharded_where_one_card_holds_a_part(script):
    for tier in ("t4", "16gb"):
        result = answer_of(script, tier, "large", "--sharded", "--from_scratch", gpus="2")
        words = result.stdout.split()
        args = resolved(script, words[words.index("--mixed_precision") :])
        assert not args.freeze_encoder and args.gradient_checkpointing
        assert 2 * update_of(words) == UPDATES[script]["large"]
        assert row_of(script, tier, "large")[2] in ("RF8", "RG")  # without --sharded


@pytest.mark.parametrize(
    ("flags", "variables", "cards", "batch"),
    [
        ("--dry_run 8GB", {"gpus": "4"}, "4x8GB", 6),
        ("--dry_run=16gb --sharded", machine("0", "2"), "4x16gb", 5),
        ("--dry_run A100 80GB", {"gpus": "2"}, "2xA100 80GB", 5),
        ("--dry_run", {"gpus": "2"}, "2x", 5),
        ("--dry_run 2x16gb", {}, "2x16gb", 5),
        ("--dry_run 8 x 16gb", {"gpus": "2"}, "8 x 16gb", 5),
    ],
)
def test_a_plan_for_several_gpus_runs_in_one_process(flags, variables, cards, batch):
    tier = "8gb" if "8GB" in flags else "16gb"
    result = answer_of(PARAKEET, tier, "0.6b", "large_data", *flags.split(), **variables)
    assert result.stdout.startswith("python ")
    words = shlex.split(result.stdout.partition(".py ")[2])
    assert resolved(PARAKEET, words).dry_run == cards
    assert update_of(words) * int(cards[0]) == UPDATES[PARAKEET]["0.6b"]
    assert cut_of(words)[0] == batch
    said = "" if cards in flags else f": one process plans for {cards}\n"
    assert result.stderr.endswith(said) and result.stderr.count("\n") == bool(said)


@pytest.mark.parametrize("card", ["2x16gb", "2 x 16GB", "4X16gb"])
def test_a_plan_for_several_gpus_has_the_tier_of_one(card):
    result = answer_of(PARAKEET, "auto", "0.6b", "--dry_run", *card.split())
    assert "tier: 16gb (auto)" in result.stderr


# --- a copy of the project ------------------------------------------------------------------------

BASE = getattr(sys, "_base_executable", sys.executable)
TOOLS = "awk bash cat chmod dirname env flock grep rm sed sh sleep touch tr".split()
MET = {"torch": "2.11.0+cu130", "jiwer": "4.0.1"}
FAKE_PIP = """
import os, pathlib, re, subprocess, sys, sysconfig, time
def main(arguments):
    if arguments[0] == "--version":
        return 0
    if arguments[0] == "--python":
        return subprocess.call([arguments[1], __file__, *arguments[2:]])
    with open(os.environ["PIP_LOG"], "a") as log:
        print(sys.prefix, *("from " + a for a in arguments if a.startswith("http")), file=log)
    if os.environ.get("PIP_FAILS"):
        return "ERROR: no route to host"
    needed = open(arguments[arguments.index("-r") + 1]).read()
    for name, version in re.findall(r"(\\w+)>=([\\d.]+)", needed):
        folder = pathlib.Path(sysconfig.get_path("purelib"), f"{name}-{version}.dist-info")
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Name: {name}\\nVersion: {version}\\n")
    end = time.monotonic() + 60
    while not os.path.exists(os.environ.get("PIP_WAITS_FOR", "/")) and time.monotonic() < end:
        time.sleep(0.01)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
FAKE_TORCHRUN = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "environment": [os.environ.get("OMP_NUM_THREADS")]}))
"""
FAKE_NVIDIA_SMI = """#!/bin/bash
# One word of CARDS for each GPU's memory; a GPU is named by its number or by GPU-<number>.
[ -n "$CARDS" ] || { echo "NVIDIA-SMI has failed: no driver"; exit 9; }
gpus=($CARDS)
while [ $# -gt 0 ]; do
  if [ "$1" = -i ]; then
    number=${2#GPU-}
    if [[ $number =~ ^[0-9]+$ ]] && [ "$number" -lt ${#gpus[@]} ]; then
      echo "${gpus[$number]}"
      exit
    fi
    echo "No devices were found"
    exit 6
  fi
  shift
done
printf '%s\\n' "${gpus[@]}"
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def add_packages(site: Path, packages: dict[str, str]) -> None:
    for name, version in packages.items():
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def make_venv(path: Path, packages: dict[str, str]) -> Path:
    """A virtual environment that claims to have the packages; returns its bin folder."""
    subprocess.run([BASE, "-m", "venv", "--without-pip", path], check=True)
    add_packages(next(path.glob("lib/python3*/site-packages")), packages)
    return path / "bin"


def make_base(path: Path, *paths: Path) -> Path:
    """An interpreter outside virtual environments whose only packages are those in `paths`; returns
    its folder."""
    search = ":".join(map(str, paths))
    executable(path / "python3", f'#!/bin/sh\nPYTHONPATH="{search}" exec "{BASE}" -S "$@"\n')
    return path


@pytest.fixture
def project(tmp_path):
    """A copy of what the scripts need, in a folder with a space and Devanagari in its name."""
    root = tmp_path / "a b हांव"
    (root / "common").mkdir(parents=True)
    for name in (KONKANI, "common/env.sh"):
        shutil.copy(ROOT / name, root / name)
    needed = "# a comment\ntorch>=2.8,<2.16\njiwer>=4,<5\n"
    (root / "requirements.txt").write_text(needed)
    stub = """
    import json, os, sys
    environment = [os.environ.get(n) for n in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    report = {"arguments": sys.argv[1:], "prefix": sys.prefix, "environment": environment}
    print(json.dumps(report))
    """
    executable(root / "recipes/konkani_conformer.py", textwrap.dedent(stub))
    for tool in TOOLS:
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / "tools" / tool).symlink_to(shutil.which(tool))
    executable(tmp_path / "pip/pip/__main__.py", FAKE_PIP)
    executable(tmp_path / "pip/pip/__init__.py", "")
    return root


def environment(project: Path, *path: Path, **extra) -> dict[str, str]:
    folder = project.parent
    return {
        "PATH": ":".join(map(str, [*path, folder / "tools"])),
        "HOME": str(folder),
        "TORCH_INDEX": "",
        "LC_ALL": "C.UTF-8",
        "PIP_LOG": str(folder / "pip.log"),
        **extra,
    }


def run(project: Path, *arguments, path=(), command=None, cwd=None, **extra):
    """Runs a script in the copy of the project, with `path` before the tools in PATH."""
    return subprocess.run(
        [*(command or [str(project / KONKANI)]), *arguments],
        env=environment(project, *path, **extra),
        cwd=cwd or project.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def report_of(result: subprocess.CompletedProcess) -> dict:
    """What the stub for the recipe printed."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_print_can_be_pasted_and_works_from_anywhere(project, tmp_path):
    words = ["--print", "--train_manifest", "my data/गोंय.json", "--learning_rate", "1e-4"]
    result = run(project, "t4", "minimal", *words)
    assert result.returncode == 0, result.stderr
    pasted = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {result.stdout.strip()}"], capture_output=True, text=True
    )
    pasted = pasted.stdout.split("\0")[:-1]
    assert pasted[:2] == ["python", str(project / "recipes/konkani_conformer.py")]
    assert pasted[-4:] == words[1:]
    assert value(pasted, "--batch_size") == "2" and value(pasted, "--d_model") == "128"
    for command, cwd in (
        (["sh", KONKANI], project),
        (["bash", f"{project.name}/{KONKANI}"], tmp_path),
        ([f"./{KONKANI}"], project),
    ):
        other = run(project, "t4", "minimal", *words, command=command, cwd=cwd)
        assert other.stdout == result.stdout


def test_the_first_row_that_matches_counts(project):
    """The form of a table, as common/env.sh describes it."""
    preset = """. "$0/common/env.sh"
    rows='
    #tier size  batch accumulation what
    *     small + --keep_last 3
    big   small 4 2 R H --eval_batch_size 8 # a comment; 8 is a number here
    big   huge  ! small or tiny
    *     *     2 4
    '
    read_arguments "$@"; size=${size_given:-small}; pick_row; run any"""
    letters = "--gradient_checkpointing --use_cpu_offload states --keep_last 3 --eval_batch_size 8"
    without = "--gradient_checkpointing --keep_last 3 --eval_batch_size 8 --optimizer adamw_8bit"

    def answer(preset: str, *words: str):
        return run(project, *words, "--print", command=["bash", "-ec", preset, str(project)])

    for words, flags in {
        "big": letters,
        "big small": letters,
        "big --optimizer adamw_8bit": without,
    }.items():
        result = answer(preset, *words.split())
        cut = "--batch_size 4 --gradient_accumulation_steps 2"
        assert shlex.split(result.stdout)[2:] == f"--mixed_precision {cut} {flags}".split()
    for letter, level in {"G": "gradients", "W": "weights", "8": "adamw_8bit"}.items():
        other = preset.replace("4 2 R H", f"4 2 R {letter}")
        mine = ["--optimizer", "adamw_8bit"]
        flag = ["--use_cpu_offload", level]
        if letter == "8":
            flag[0], mine = "--optimizer", ["--use_cpu_offload", "gradients"]
        assert " ".join(flag) in answer(other, "big").stdout
        result = answer(other, "big", *mine)
        assert result.stdout.split()[-2:] == mine and " ".join(flag) not in result.stdout
    preset = preset.replace("*     *     2 4", "tiny  small 2 4")
    message = error_line(answer(preset, "big", "huge"), 2)
    assert message == "error: huge does not fit in tier big: take small or tiny"
    assert "huge has no row in tier tiny" in error_line(answer(preset, "tiny", "huge"), 2)
    assert value(answer(preset, "tiny").stdout.split(), "--keep_last") == "3"
    message = error_line(answer(preset.replace("4 2 R H", "4 2 R X"), "big"), 1)
    assert message.endswith("size small has an unknown letter, X")


# --- the tier -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cards", "visible", "tier"),
    [
        ("81559", None, "a100"),
        ("40960", None, "24gb"),
        ("24564", None, "24gb"),
        ("23028", None, "24gb"),
        ("16376", None, "16gb"),
        ("15360", None, "t4"),
        ("15109", None, "t4"),
        ("12288", None, "8gb"),  # this table has no 12gb
        ("8192", None, "8gb"),
        ("7900", None, "8gb"),
        ("6144", None, "6gb"),
        ("5900", None, "6gb"),
        ("4096", None, "4gb"),
        ("2048", None, "4gb"),
        ("[N/A]", None, "4gb"),
        ("", None, "cpu"),
        ("81559 6144", "1", "6gb"),
        ("81559 6144", "1,0", "6gb"),
        ("81559 6144", "GPU-1", "6gb"),
        ("6144 81559", "0", "6gb"),
        ("81559", "", "cpu"),
        ("81559", "-1", "cpu"),
        ("81559", "MIG-2f1a", "4gb"),
        ("", "MIG-2f1a", "cpu"),
    ],
)
def test_the_tier_follows_the_first_visible_gpu(project, tmp_path, cards, visible, tier):
    executable(tmp_path / "driver/nvidia-smi", FAKE_NVIDIA_SMI)
    extra = {"CARDS": cards}
    if visible is not None:
        extra["CUDA_VISIBLE_DEVICES"] = visible
    result = run(project, "--print", path=[tmp_path / "driver"], **extra)
    assert result.returncode == 0 and result.stderr == f"tier: {tier} (auto)\n"
    if tier == "cpu":  # torch has the last word on the GPU
        assert value(result.stdout.split(), "--device") == "auto"
    else:
        assert "--device" not in result.stdout


@pytest.mark.parametrize(
    ("memory", "tiers"),
    [
        ("81559", {MORSE: "32gb", VIETNAMESE: "a100", PARAKEET: "a100", XTTS: "a100"}),
        ("16376", dict.fromkeys(WITH_DEMO, "16gb")),
        ("15360", dict.fromkeys(WITH_DEMO, "t4")),
        ("15109", dict.fromkeys(WITH_DEMO, "t4")),
        ("12288", dict.fromkeys(WITH_DEMO, "12gb")),
        ("12282", dict.fromkeys(WITH_DEMO, "12gb")),
        ("11264", dict.fromkeys(WITH_DEMO, "8gb")),
        ("6144", dict.fromkeys(WITH_DEMO, "6gb")),
        ("4096", dict.fromkeys(WITH_DEMO, "4gb")),
    ],
)
def test_every_script_picks_from_the_tiers_of_its_table(project, tmp_path, memory, tiers):
    executable(tmp_path / "driver/nvidia-smi", FAKE_NVIDIA_SMI)
    for script, tier in tiers.items():
        shutil.copy(ROOT / script, project / script)
        command = [str(project / script), "--print"]
        result = run(project, command=command, path=[tmp_path / "driver"], CARDS=memory)
        assert result.returncode == 0 and result.stderr == f"tier: {tier} (auto)\n"


def test_no_nvidia_smi_is_the_cpu(project):
    assert run(project, "auto", "--print").stderr == "tier: cpu (auto)\n"
    assert value(run(project, "cpu", "--print").stdout.split(), "--device") == "cpu"


def test_without_a_tier_the_card_of_a_plan_is_the_tier():
    plan = ("--dry_run", "8GB")
    expected = command_of(KONKANI, "8gb", *plan)
    assert command_of(KONKANI, *plan) == command_of(KONKANI, "auto", *plan) == expected
    assert command_of(KONKANI, "16gb", *plan) == [*command_of(KONKANI, "16gb"), *plan]


# --- the environment ------------------------------------------------------------------------------


def test_the_active_interpreter_is_used_where_it_has_everything(project, tmp_path):
    result = run(project, "t4", path=[make_venv(tmp_path / "active", MET)])
    assert report_of(result)["prefix"] == str(tmp_path / "active") and not result.stderr
    assert not (project / ".venv").exists() and not (project / ".venv.lock").exists()


@pytest.mark.parametrize("lacking", ["jiwer", "torch"])
def test_an_active_venv_that_lacks_something_is_left_alone(project, tmp_path, lacking):
    packages = {name: version for name, version in MET.items() if name != lacking}
    active = make_venv(tmp_path / "active", packages)
    before = sorted((tmp_path / "active").rglob("*"))
    result = run(project, "t4", path=[active], PYTHONPATH=str(tmp_path / "pip"))
    assert report_of(result)["prefix"] == str(project / ".venv")
    assert (tmp_path / "pip.log").read_text().splitlines() == [str(project / ".venv")]
    assert "include-system-site-packages = false" in (project / ".venv/pyvenv.cfg").read_text()
    assert sorted((tmp_path / "active").rglob("*")) == before


def test_a_complete_venv_leaves_nothing_to_do(project, tmp_path):
    make_venv(project / ".venv", MET)
    result = run(project, "t4", path=[make_base(tmp_path / "base")])
    assert report_of(result)["prefix"] == str(project / ".venv") and not result.stderr


def test_a_venv_that_lacks_packages_gets_them(project, tmp_path):
    make_venv(project / ".venv", {"jiwer": MET["jiwer"]})
    (project / ".venv/left_over").touch()
    path = [make_base(tmp_path / "base", tmp_path / "pip")]
    result = run(project, "t4", path=path, PYTHONPATH=str(tmp_path / "pip"))
    assert report_of(result)["prefix"] == str(project / ".venv")
    assert (project / ".venv/left_over").exists()


@pytest.mark.parametrize(
    ("packages", "shared"),
    [
        ({"torch": "2.8.0+cu126"}, True),
        ({"torch": "2.7.1"}, False),
        ({"torch": "2.15.0+cu132"}, True),
        ({"torch": "2.16.0"}, False),
        ({}, False),
    ],
)
def test_a_venv_stands_on_a_base_only_where_that_has_a_usable_torch(
    project, tmp_path, packages, shared
):
    """Colab and conda: their torch is used, their installation is not touched."""
    add_packages(tmp_path / "base_packages", packages)
    path = [make_base(tmp_path / "base", tmp_path / "base_packages", tmp_path / "pip")]
    result = run(project, "t4", path=path, PYTHONPATH=str(tmp_path / "pip"))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "pip.log").read_text().splitlines() == [str(project / ".venv")]
    configuration = (project / ".venv/pyvenv.cfg").read_text()
    assert f"include-system-site-packages = {str(shared).lower()}" in configuration


def test_without_ensurepip_the_bases_own_pip_installs(project, tmp_path):
    """Debian's and Colab's Python without the package python3-venv."""
    executable(tmp_path / "debian/ensurepip.py", "raise ImportError")
    path = [make_base(tmp_path / "base", tmp_path / "pip", tmp_path / "debian")]
    result = run(project, "t4", path=path, PYTHONPATH=str(tmp_path / "debian"))
    assert report_of(result)["prefix"] == str(project / ".venv")
    assert (tmp_path / "pip.log").read_text().splitlines() == [str(project / ".venv")]


@pytest.mark.parametrize("lacking", ["ensurepip", "venv"])
def test_without_any_pip_or_without_venv(project, tmp_path, lacking):
    executable(tmp_path / f"debian/{lacking}.py", "raise ImportError")
    path = [make_base(tmp_path / "base", tmp_path / "debian")]
    result = run(project, "t4", path=path, PYTHONPATH=str(tmp_path / "debian"))
    assert "sudo apt install python3-venv" in error_line(result, 1)


def test_without_a_python_or_with_an_old_one_only(project, tmp_path):
    needed = "error: Python 3.10 to 3.14 is needed and"
    assert f"{needed} none was found" in error_line(run(project, "t4"), 1)
    old = executable(tmp_path / "old/python3", "#!/bin/sh\nexit 1\n")
    assert f"{needed} {old} was found" in error_line(run(project, "t4", path=[old.parent]), 1)
    assert not (project / ".venv").exists()
    # A newer one under another name is found.
    new = make_base(tmp_path / "new", tmp_path / "pip")
    (new / "python3").rename(new / "python3.10")
    result = run(project, "t4", path=[old.parent, new], PYTHONPATH=str(tmp_path / "pip"))
    assert report_of(result)["prefix"] == str(project / ".venv")


@pytest.mark.parametrize("state", ["broken", "unfinished"])
def test_a_broken_or_unfinished_venv_is_made_anew(project, tmp_path, state):
    """Broken: the system's Python was upgraded. Unfinished: pip was killed while it copied the last
    package, so that the metadata of all packages are there."""
    if state == "broken":
        (project / ".venv/bin").mkdir(parents=True)
        (project / ".venv/bin/python").symlink_to("/nonexistent/python3")
    else:
        make_venv(project / ".venv", MET)
        (project / ".venv.lock").write_text("unfinished\n")
    (project / ".venv/left_over").touch()
    path = [make_base(tmp_path / "base", tmp_path / "pip")]
    result = run(project, "t4", path=path, PYTHONPATH=str(tmp_path / "pip"))
    assert report_of(result)["prefix"] == str(project / ".venv")
    assert not (project / ".venv/left_over").exists() and not (project / ".venv.lock").read_text()


def test_an_installation_that_failed_is_repeated(project, tmp_path):
    path = [make_base(tmp_path / "base", tmp_path / "pip")]
    extra = {"path": path, "PYTHONPATH": str(tmp_path / "pip")}
    line = error_line(run(project, "t4", PIP_FAILS="yes", **extra), 1)
    assert "pip could not install requirements.txt" in line
    assert report_of(run(project, "t4", **extra))["prefix"] == str(project / ".venv")


@pytest.mark.parametrize("state", ["reached", "refused", "driver"])
def test_without_an_nvidia_driver_torch_is_the_cpu_build(project, tmp_path, state):
    if Path("/proc/driver/nvidia").exists() or Path("/dev/nvidia0").exists():
        pytest.skip("this machine has an NVIDIA driver")
    if state == "driver":
        executable(tmp_path / "tools/nvidia-smi", "#!/bin/sh\nexit 1\n")
    path = [make_base(tmp_path / "base", tmp_path / "pip")]
    (tmp_path / "index/torch").mkdir(parents=True)
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "index")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}"
        asked = f"{index}/gone" if state == "refused" else index
        result = run(project, "t4", path=path, PYTHONPATH=str(tmp_path / "pip"), TORCH_INDEX=asked)
        server.shutdown()
    venv = str(project / ".venv")
    assert report_of(result)["prefix"] == venv
    log = (tmp_path / "pip.log").read_text().splitlines()
    assert log == ([f"{venv} from {index}", venv] if state == "reached" else [venv])
    assert ("cannot be used: torch comes from pip's own index" in result.stderr) == (
        state == "refused"
    )


def test_the_real_pip_without_a_network(project, tmp_path):
    pip = pytest.importorskip("pip")
    (tmp_path / "real").mkdir()
    (tmp_path / "real/pip").symlink_to(Path(pip.__file__).parent)
    path = [make_base(tmp_path / "base", tmp_path / "real")]
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "tools"),
        "PIP_CONFIG_FILE": os.devnull,
    }
    result = run(project, "t4", path=path, PYTHONPATH=str(tmp_path / "real"), **offline)
    assert "check the network and the disk, then run this again" in error_line(result, 1)
    assert "No matching distribution found for torch" in result.stderr and not result.stdout


def test_a_folder_that_cannot_be_written_to(project, tmp_path):
    """A folder in the lock's place stands for a read-only file system, which a test that may run as
    root cannot make."""
    (project / ".venv.lock").mkdir()
    result = run(project, "t4", path=[make_base(tmp_path / "base", tmp_path / "pip")])
    assert "cannot be written to" in error_line(result, 1)
    # An environment that has everything needs no writing.
    report_of(run(project, "t4", path=[make_venv(tmp_path / "active", MET)]))


def start(project: Path, environ: dict[str, str]) -> subprocess.Popen:
    """Starts a script in a process group of its own, as a terminal does."""
    return subprocess.Popen(
        [str(project / KONKANI), "t4"],
        env=environ,
        cwd=project.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # & and nohup ignore it
    )


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)


def test_two_at_once_install_once(project, tmp_path):
    extra = environment(
        project,
        make_base(tmp_path / "base", tmp_path / "pip"),
        PYTHONPATH=str(tmp_path / "pip"),
        PIP_WAITS_FOR=str(tmp_path / "go"),
    )
    first = start(project, extra)
    wait_for(tmp_path / "pip.log", first)
    second = start(project, extra)
    line = second.stderr.readline()
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [json.loads(output)["prefix"] for output, _ in outputs] == [str(project / ".venv")] * 2
    assert line.endswith(".venv: waiting for it\n") and not outputs[1][1]
    assert len((tmp_path / "pip.log").read_text().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_or_a_kill_ends_the_installation_which_is_repeated(project, tmp_path, number):
    path = make_base(tmp_path / "base", tmp_path / "pip")
    waits = str(tmp_path / "go")
    extra = environment(project, path, PYTHONPATH=str(tmp_path / "pip"), PIP_WAITS_FOR=waits)
    process = start(project, extra)
    wait_for(tmp_path / "pip.log", process)
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number) and not output
    assert "error: " not in errors
    assert (project / ".venv.lock").read_text() == "unfinished\n"
    (tmp_path / "go").touch()
    report_of(run(project, "t4", path=[path], PYTHONPATH=str(tmp_path / "pip")))
    assert len((tmp_path / "pip.log").read_text().splitlines()) == 2


def test_gpus_starts_torchs_launcher(project, tmp_path):
    """With the launcher's flags, the recipe and its flags. tests/recipes/test_konkani_commands.py
    runs the real launcher."""
    active = make_venv(tmp_path / "active", MET)
    site = next((tmp_path / "active").glob("lib/*/*"))
    executable(site / "torch/distributed/run.py", FAKE_TORCHRUN)
    words = ["t4", "--learning_rate", "1e-4"]
    result = run(project, *words, path=[active], GPUS="2")
    recipe = str(project / "recipes/konkani_conformer.py")
    report = report_of(result)
    launcher = ["--standalone", "--nproc_per_node", "2", recipe]
    assert report["arguments"] == [*launcher, *command_of(KONKANI, *words, gpus="2")]
    assert report["environment"] == ["1"] and not result.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["expandable_segments:True"] * 2),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, ["a:1", "a:1"]),
        ({"PYTORCH_ALLOC_CONF": "b:1"}, ["b:1", "b:1"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"}, ["a:1", "b:1"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, ["", ""]),
    ],
)
def test_a_users_allocator_settings_reach_the_recipe(project, tmp_path, given, expected):
    result = run(project, "t4", path=[make_venv(tmp_path / "active", MET)], **given)
    assert report_of(result)["environment"] == expected


def test_the_page_has_an_environment_of_both_files(project, tmp_path):
    """In a fresh clone. Its --help needs no packages."""
    shutil.copy(ROOT / WEBUI, project / WEBUI)
    (project / "requirements-webui.txt").write_text("# a comment\ngradio>=6.16,<7\n")
    shutil.copytree(project / "recipes", project / "webui")
    (project / "webui/konkani_conformer.py").rename(project / "webui/app.py")
    command = [str(project / WEBUI)]
    for words in ([*command, "--help"], [*command, "--port", "1", "-h"], ["sh", *command, "-h"]):
        result = run(project, command=words)
        assert result.returncode == 0 and "./run_webui.sh [--port 7860]" in result.stdout
    assert not (project / ".venv").exists()

    path = [make_base(tmp_path / "base", tmp_path / "pip")]
    extra = {"path": path, "PYTHONPATH": str(tmp_path / "pip"), "command": command}
    report = report_of(run(project, "--port", "1", "--data", "a b", **extra))
    assert report["prefix"] == str(project / ".venv")
    assert report["arguments"] == ["--port", "1", "--data", "a b"]
    (site,) = (project / ".venv").glob("lib/*/site-packages")
    assert {"gradio-6.16.dist-info", "jiwer-4.dist-info"} <= {path.name for path in site.iterdir()}
    assert not run(project, **extra).stderr  # nothing is left to do


def test_scripts_can_be_run():
    for path in [*ROOT.glob("run_*.sh"), ROOT / ".ci/run"]:
        assert os.access(path, os.X_OK), path
        subprocess.run(["bash", "-n", path], check=True)
