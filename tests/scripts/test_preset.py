"""What common/preset.py makes of the scripts' tables and a user's words.
tests/scripts/test_wrappers.py runs the scripts themselves."""

import functools
import importlib
import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import tier_tables
from common import options, preset
from speech.writing import languages
from tests.presets import ROOT, answer, cut_of, declared, error_of, flags_of, update_of, value

KONKANI = "run_training_memory_optimized.sh"
VIETNAMESE = "run_whisper_vietnamese.sh"
MORSE = "run_whisper_morse.sh"
PARAKEET = "run_parakeet_tdt.sh"
XTTS = "run_xtts_amharic.sh"
SCRIPTS = [KONKANI, VIETNAMESE, MORSE, PARAKEET, XTTS]
WHISPERS = [VIETNAMESE, MORSE]
WITH_DEMO = [VIETNAMESE, MORSE, PARAKEET]
MODEL = ["--model_dir", str(ROOT)]  # resolving looks for the folder
DATA = ["--train_manifest", "train.json"]
TABLES = {script: preset.read_rows(declared(script).rows) for script in SCRIPTS}
TIERS = {script: preset.names(TABLES[script], 0) for script in SCRIPTS}
SIZES = {script: preset.names(TABLES[script], 1) for script in SCRIPTS}


@pytest.fixture(autouse=True)
def manifests_that_name_their_language(monkeypatch):
    """There is no train.json, in which `resolve` would look for one."""
    monkeypatch.setattr(languages, "of_rows", lambda *_: "am")


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
    XTTS: {"full": 240},
}


def recipe_of(script: str):
    return importlib.import_module(f"recipes.{declared(script).recipe}")


@functools.cache
def parser_of(script: str) -> options.Parser:
    parser = options.Parser("test")
    recipe_of(script).add_arguments(parser)
    return parser


def resolved(script: str, words: list[str]):
    """The recipe's namespace for these flags."""
    args = parser_of(script).parse_args(words)
    recipe_of(script).resolve(args)
    return args


def args_of(script: str, *words: str, **variables: str):
    """The recipe's namespace for a user's words."""
    return resolved(script, flags_of(script, *words, **variables))


def row_of(script: str, tier: str, size: str) -> tuple[int, int, str] | None:
    """Micro-batch, accumulation and letters of a row, as `benchmarks` reads it, or None if the
    size does not fit in the tier."""
    batch, accumulation, *rest = tier_tables.row_of(TABLES[script], tier, size)[2:]
    if batch == "!":
        return None
    letters = itertools.takewhile(lambda word: not word.startswith("--"), rest)
    return int(batch), int(accumulation), "".join(letters)


def places(script: str) -> list[tuple[str, str]]:
    """The tiers and sizes that fit."""
    pairs = itertools.product(TIERS[script], SIZES[script])
    return [pair for pair in pairs if row_of(script, *pair)]


def model_for(script: str, size: str) -> list[str]:
    if script == KONKANI or size == "demo":
        return []
    return [*MODEL, *DATA] if script == XTTS else MODEL


# --- the form of a script -------------------------------------------------------------------------

TABLE = """
#tier size  batch accumulation what
*     small + --keep_last 3
big   small 4 2 R H --eval_batch_size 8 # a comment; 8 is a number here
big   huge  S 1 8 R
big   huge  L 1 9 R
big   huge  ! small or tiny
*     *     2 4
"""


def test_a_table_alone_is_a_script():
    """Of which the first row that matches counts."""
    script = preset.Script("any", TABLE)
    cut = "--batch_size 4 --gradient_accumulation_steps 2 --gradient_checkpointing"
    more = "--keep_last 3 --eval_batch_size 8 --resume auto"
    for words in (["big"], ["big", "small"]):
        expected = f"--mixed_precision {cut} --use_cpu_offload states {more}".split()
        assert flags_of(script, *words) == expected
    assert error_of(script, "big", "huge").endswith("big: take small or tiny, or add --lora 32")
    assert cut_of(flags_of(script, "big", "huge", "--sharded")) == (1, 8)
    assert cut_of(flags_of(script, "big", "huge", "--lora", "32")) == (1, 9)
    rows = TABLE.replace("*     *     2 4", "tiny  small 2 4")
    assert "huge has no row in tier tiny" in error_of(replace(script, rows=rows), "tiny", "huge")


@pytest.mark.parametrize(("letter", "flag"), preset.LETTERS.items())
def test_a_users_choice_of_8_bits_or_a_level_wins_over_a_letter(letter, flag):
    script = preset.Script("any", TABLE.replace("R H", f"R {letter}"))
    flag = " ".join(flag)
    assert flag in " ".join(flags_of(script, "big", *MODEL))
    mine = ["--optimizer", "adamw_8bit"]
    if letter == "8":
        mine = ["--use_cpu_offload", "gradients"]
    words = flags_of(script, "big", *MODEL, *mine)
    assert words[-2:] == mine and (letter in "RF") == (flag in " ".join(words[:-2]))
    words = flags_of(script, "big", *MODEL, "--optimizer", "adamw")  # no contradiction
    assert flag in " ".join(words)


def test_lines_are_added_if_their_words_hold():
    adds = """
    new: --from_scratch --model_size SIZE # a comment
    --seed big unless tiny --max_steps: --keep_last 9
    """
    script = preset.Script("any", TABLE + "* tiny 2 4", adds, usual="tiny")
    new = ["--from_scratch", "--model_size"]
    assert flags_of(script, "big")[-5:-2] == [*new, "tiny"]
    assert flags_of(script, "big", "small")[-5:-2] == [*new, "small"]
    assert "--model_size" not in flags_of(script, "big", *MODEL)
    assert "--model_size" not in flags_of(script, "big", "--resume=a")
    assert "--model_size" in flags_of(script, "big", "small", "--resume=a")
    for words, is_added in {
        "big small --seed=1": True,
        "big small --name --seed": True,
        "big tiny --seed 1": False,
        "big small --seed 1 --max_steps 2": False,
        "big small --name seed": False,
    }.items():
        assert ("9" in flags_of(script, *words.split())) == is_added, words


# --- the words ------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_wrong_words_are_usage_errors(script):
    for word in ("small", "t5", ""):
        tiers = ", ".join(TIERS[script])
        expected = f"error: no tier '{word}': it is one of auto, {tiers}; a size comes after it"
        assert error_of(script, word) == f"{expected}, then flags"
    sizes = ", ".join(SIZES[script])
    assert error_of(script, "8gb", "huge") == f"error: no size 'huge': it is one of {sizes}"
    assert "the word 'c' is too much" in error_of(script, "a", "b", "c")


@pytest.mark.parametrize("script", SCRIPTS)
def test_using_a_model_brings_no_flags_of_training(script):
    uses = [["--evaluate"], ["--evaluate", "--test_manifest", "test.json"]]
    if script == XTTS:
        uses += [f"--synthesize selam --speaker_wav {__file__} --output c.wav".split()]
    else:
        uses += [["--transcribe", "a.wav"]]
    if script in (KONKANI, PARAKEET):
        uses += ["--align a.wav a.txt --output a.json".split()]
    for use in uses:
        on_cpu = ["--mixed_precision", "--device", "cpu", *declared(script).always.split(), *use]
        assert flags_of(script, "cpu", *use) == on_cpu
        resolved(script, on_cpu)
        on_gpu = [word for word in on_cpu if word not in ("--device", "cpu")]
        assert flags_of(script, "8gb", SIZES[script][-1], *use) == on_gpu
    # These check the machine for a run, so they have the run's flags.
    for check in (["--verify_gpu"], ["--dry_run", "8GB"], ["--dry_run"]):
        assert flags_of(script, "8gb", *check) == [*flags_of(script, "8gb"), *check]
    for given in (["--resume", "a.pt"], ["--resume=a.pt"]):
        words = flags_of(script, "8gb", *given)
        assert words[-len(given) :] == given and "auto" not in words
    assert "auto" in flags_of(script, "8gb", "--init_from", "a.pt")


def test_a_micro_batch_of_ones_own_keeps_the_update():
    """The accumulation follows from it."""
    assert cut_of(flags_of(KONKANI, "8gb", "--batch_size", "2")) == (2, 4)
    both = ("--batch_size", "1", "--gradient_accumulation_steps", "3")
    assert cut_of(flags_of(KONKANI, "8gb", *both)) == (1, 3)
    assert cut_of(flags_of(KONKANI, "8gb", "--batch_size", "3")) == (3, 3)
    said = answer(KONKANI, "8gb", "--batch_size", "3").said
    assert "update: 9 utterances in place of 8, because of --batch_size" in said


@pytest.mark.parametrize("script", [PARAKEET, XTTS])
def test_an_export_alone_does_not_train(script):
    export = ["--export", "d", "--resume", "best.safetensors"]
    for use in (export, ["--export", "d", *MODEL]):
        words = flags_of(script, "4gb", *use)
        assert words == ["--mixed_precision", *declared(script).always.split(), *use]
        resolved(script, words)
    for goal in ("--train_manifest t.json", "--max_steps 9", "--from_scratch", "--num_epochs=2"):
        assert "--batch_size" in flags_of(script, "8gb", *export, *goal.split())


def test_a_value_is_not_taken_for_a_flag_or_a_word():
    for card, tier in {
        "*": "cpu",
        "8GB --init_from a100": "8gb",
        "8 GB --seed 24gb": "8gb",
    }.items():
        said = answer(PARAKEET, "--dry_run", *card.split(), CUDA_VISIBLE_DEVICES="").said
        assert said == f"tier: {tier} (auto)\n", card


# --- the rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_row_has_the_update_of_its_size_and_is_understood(script):
    for tier, size in places(script):
        row = row_of(script, tier, size)
        words = flags_of(script, tier, size, *model_for(script, size))
        args = resolved(script, words)
        assert cut_of(words) == row[:2] == (args.batch_size, args.gradient_accumulation_steps)
        assert update_of(words) == UPDATES[script][size]
        assert args.gradient_checkpointing == ("R" in row[2])
        assert args.optimizer == ("adamw_8bit" if "8" in row[2] else "adamw")
        levels = [level for letter, level in LEVELS.items() if letter in row[2]]
        assert [args.use_cpu_offload] == (levels or [None])
        assert getattr(args, "freeze_encoder", False) == ("F" in row[2])
        assert args.device == ("cpu" if tier == "cpu" else "auto")
        assert (args.mixed_precision, args.resume) == ("auto", "auto")
        where = "." if script == KONKANI else f"runs/{declared(script).recipe}"
        assert args.output_dir == where
        if script not in (KONKANI, XTTS) and size != "demo":  # the model has its own size
            assert (args.from_scratch, args.model_size) == (False, None)


@pytest.mark.parametrize("script", WHISPERS)
def test_a_size_that_does_not_fit_names_those_that_do(script):
    refused = set(itertools.product(TIERS[script], SIZES[script])) - set(places(script))
    assert refused
    for tier, size in refused:
        message = error_of(script, tier, size, *MODEL)
        assert message.startswith(f"error: {size} does not fit in tier {tier}: take ")
        fitting = re.split(", or |, | or ", message.partition(": take ")[2])
        if fitting[-1] == "add --lora 32":  # with which this size fits, too
            fitting.pop()
            adapted = flags_of(script, tier, size, *MODEL, "--lora", "32")
            assert update_of(adapted) == UPDATES[script][size]
        assert fitting and all(row_of(script, tier, other) for other in fitting)


@pytest.mark.parametrize("script", WITH_DEMO)
def test_without_model_and_data_a_script_runs_the_recipes_own_demo_in_every_tier(script):
    plain = resolved(script, [])
    for words in [[], *([tier] for tier in TIERS[script]), ["auto", "demo"], ["8gb", "demo"]]:
        found = flags_of(script, *words)
        args = resolved(script, found)
        assert (args.model_size, args.max_steps) == ("demo", recipe_of(script).DEMO_STEPS)
        assert update_of(found) == UPDATES[script]["demo"]
        assert args.warmup_steps is args.learning_rate is None
        assert "--max_target_tokens" not in found
        assert (args.eval_every, args.save_every) == (plain.eval_every, plain.save_every)
    message = error_of(script, "cpu", "demo", *MODEL)
    assert "size demo is a small model that begins at random" in message


@pytest.mark.parametrize("script", [*WITH_DEMO, "run_wav2vec2_ctc.sh", "run_matcha_voice.sh"])
def test_the_demos_model_learns_from_own_data(script):
    plain = flags_of(script, "cpu", "demo")
    found = flags_of(script, "CPU", "demo", *DATA)
    assert cut_of(found) == cut_of(plain)
    args = resolved(script, found)
    assert (args.model_size, args.learning_rate) == ("demo", None)
    assert getattr(args, "from_scratch", True)  # Matcha has no such flag


def test_konkanis_sizes_are_the_guides_in_every_tier():
    shapes = {"optimized": (192, 8, 4), "minimal": (128, 6, 3), "original": (256, 12, 6)}
    for tier, size in itertools.product(TIERS[KONKANI], shapes):
        args = args_of(KONKANI, tier, size)
        assert (args.d_model, args.encoder_layers, args.decoder_layers) == shapes[size]
        assert args.empty_cache_every == 50
    assert cut_of(flags_of(KONKANI, "t4")) == (2, 4)
    assert flags_of(KONKANI, "t4") == flags_of(KONKANI, "t4", "optimized")


@pytest.mark.parametrize("script", WHISPERS)
def test_a_whisper_from_scratch_has_the_size_of_the_row(script):
    for tier, size in places(script):
        if size in ("demo", "many"):
            continue
        if "F" in row_of(script, tier, size)[2]:
            message = error_of(script, tier, size)
            assert f"{size} fits in tier {tier} only with a frozen encoder" in message
        else:
            args = args_of(script, tier, size, *DATA)
            assert args.from_scratch
            assert args.model_size == {"large": "large-v3"}.get(size, size)


def test_vietnamese_defaults_are_the_guides():
    args = args_of(VIETNAMESE, "8gb", *DATA)
    assert (args.model_size, args.from_scratch, args.learning_rate) == ("base", True, 1e-4)
    assert (args.warmup_steps, args.max_steps, args.lr_schedule) == (1000, 50_000, "cosine")
    assert (args.save_every, args.keep_last, args.max_target_tokens) == (1000, 5, 256)
    args = args_of(VIETNAMESE, "8gb", "tiny", *DATA, *MODEL, "--num_epochs", "3")
    assert (args.num_epochs, args.max_steps) == (3, None)
    assert (args.learning_rate, args.warmup_steps) == (None, 1000)
    args = args_of(VIETNAMESE, "8gb", "tiny", *DATA, *MODEL)
    assert (args.num_epochs, args.max_steps) == (10, 50_000)
    args = args_of(VIETNAMESE, "8gb", "tiny", *DATA, *MODEL, "--max_steps", "70000")
    assert (args.num_epochs, args.max_steps) == (None, 70_000)


def test_a_parakeet_has_the_size_of_the_row_or_of_its_file(tmp_path):
    file = ["--model_file", __file__]
    for size in ("110m", "0.6b", "nemotron"):
        for given in ([], DATA, ["--from_scratch"]):
            args = args_of(PARAKEET, "8gb", size, *given)
            assert args.from_scratch and args.model_size == size
        assert not args_of(PARAKEET, "8gb", size, *file).from_scratch
    (tmp_path / "a.nemo").touch()
    for given in (["--model_dir", "model"], DATA, ["--from_scratch"]):  # of unknown size
        assert flags_of(PARAKEET, "8gb", *given) == flags_of(PARAKEET, "8gb", "0.6b", *given)
    for given in (file, [f"--model_dir={tmp_path}", *DATA]):
        assert flags_of(PARAKEET, "8gb", *given) == flags_of(PARAKEET, "8gb", "110m", *given)
    with open(tmp_path / "a.nemo", "wb") as large:
        large.truncate(1001 * 2**20)
    given = ["--model_dir", str(tmp_path)]
    assert flags_of(PARAKEET, "8gb", *given) == flags_of(PARAKEET, "8gb", "0.6b", *given)


def test_a_script_without_a_demo_says_what_it_needs():
    """Before anything is installed."""
    for words in ([], ["8gb"], ["auto", "full", "small_data"]):
        ended = subprocess.run([ROOT / XTTS, *words], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2 and ended.stderr == (
            "error: xtts_amharic has no demo: give it a model and recordings, with --model_dir,"
            " --train_manifest, --train_csv, --init_from\n"
        )


def test_a_users_flags_win_over_the_rows():
    mine = ["--batch_size", "1", "--no_gradient_checkpointing"]
    args = args_of(PARAKEET, "8gb", "0.6b", *MODEL, *mine)
    assert args.batch_size == 1 and not args.gradient_checkpointing
    assert args.optimizer == "adamw_8bit"
    # A user's option takes the place of the row's that it excludes.
    args = args_of(PARAKEET, "8gb", "0.6b", *MODEL, "--use_cpu_offload")
    assert args.optimizer == "adamw" and args.use_cpu_offload
    mine = ["--model_size=tiny", "--learning_rate=1e-3", "--output_dir", "elsewhere"]
    args = args_of(VIETNAMESE, "cpu", *DATA, *mine)
    assert (args.model_size, args.learning_rate, args.output_dir) == ("tiny", 1e-3, "elsewhere")


# --- how much speech there is ---------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_little_speech_and_several_gpus_cut_the_update_of_every_row(script):
    """Into the largest micro-batches of the row that divide a GPU's share. All else stays."""
    cuts = [("large_data", 256, 1), ("small_data", 16, 1), ("medium_data", 48, 1)]
    cuts += [("", 256, 2), ("", 256, 8)]
    for (tier, size), (data, most, gpus) in itertools.product(places(script), cuts):
        if data and (script == KONKANI or size == "demo"):
            continue
        given = [tier, size, *model_for(script, size)]
        one = flags_of(script, *given)
        words = flags_of(script, *data.split(), *given, GPUS=str(gpus))
        share = min(most, update_of(one)) // gpus
        batch = cut_of(one)[0]
        batch = max(number for number in range(1, batch + 1) if share % number == 0)
        assert cut_of(words) == (batch, share // batch), (tier, size, data, gpus)
        for flag in ("--batch_size", "--gradient_accumulation_steps"):
            words[words.index(flag) + 1] = value(one, flag)
        assert words == one


def test_the_word_for_the_data_stands_beside_tier_and_size():
    expected = flags_of(PARAKEET, "8gb", "110m", "small_data", *MODEL)
    for words in ("8gb small_data 110m", "small_data 8gb 110m"):
        assert flags_of(PARAKEET, *words.split(), *MODEL) == expected
    assert update_of(flags_of(XTTS, "small_data", *MODEL)) == 16
    assert cut_of(flags_of(XTTS, "8gb", "small_data", *MODEL, GPUS="4")) == (4, 1)
    assert "no size 'small_data'" in error_of(KONKANI, "8gb", "small_data")
    message = error_of(PARAKEET, "8gb", "small_data")
    assert message == (
        "error: small_data is for your own recordings: add --train_manifest or a model"
    )
    message = error_of(XTTS, "8gb", "small_data", *MODEL, GPUS="3")
    assert "does not divide an update of 16" in message


def write_manifest(path: Path, hours: float) -> Path:
    row = {"audio_filepath": "a.wav", "text": "a", "duration": 6.0}
    path.write_text((json.dumps(row) + "\n") * round(600 * hours), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("hours", "word", "told"),
    [(1.5, "small_data", "1.5 h"), (3, "medium_data", "3 h"), (30, "large_data", "20 or more h")],
)
def test_auto_is_the_hours_of_the_manifest(tmp_path, hours, word, told):
    script = replace(declared(XTTS), python=sys.executable)
    manifest = write_manifest(tmp_path / "my train*.json", hours)
    for given in ([f"--train_csv={manifest}"], ["--train_manifest", str(manifest)]):
        found = answer(script, "16gb", *MODEL, *given)
        assert found.said == f"data: {word} (auto: {told} of speech)\n"
        by_hand = answer(script, "16gb", word, *MODEL, *given)
        assert by_hand.command == found.command and not by_hand.said


def test_morse_recordings_are_a_folder(tmp_path):
    script = replace(declared(MORSE), python=sys.executable)
    rows = ["id,audio_file,text,duration", *(f"{n},a{n}.wav,CQ,20" for n in range(200))]
    (tmp_path / "metadata.csv").write_text("\n".join(rows))
    found = answer(script, "8gb", *MODEL, "--data_dir", str(tmp_path))
    assert found.said == "data: small_data (auto: 1.1 h of speech)\n"
    assert update_of(found.command) == 16
    found = answer(script, "8gb", *MODEL, "--data_dir", str(tmp_path), "--max_samples", "7")
    assert found.said == "data: small_data (auto: 0.039 h of speech)\n"


def test_hours_that_are_not_known_are_many(tmp_path):
    script = replace(declared(PARAKEET), python="")
    manifest = write_manifest(tmp_path / "train.json", 1)
    given = ["8gb", *MODEL, "--train_manifest", str(manifest)]
    unknown = "data: large_data (auto: the hours of speech are not known"
    found = answer(script, *given, "--print")
    assert found.said == f"{unknown} before the packages are installed)\n"
    manifest.write_text("no manifest")
    script = replace(script, python=sys.executable)
    found = answer(script, *given)
    assert found.said == f"{unknown})\n" and update_of(found.command) == 120
    assert not answer(script, "8gb", *MODEL, *DATA).said  # that it is missing the recipe will say


# --- several GPUs and machines --------------------------------------------------------------------

ONE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # for every start of the processes


def machine(number: str, gpus: str = "1") -> dict[str, str]:
    """What a user sets on one of two machines."""
    return {"NODES": "2", "NODE": number, "HEAD": "a.b:29500", "GPUS": gpus}


def test_an_update_that_gpus_does_not_divide_is_a_usage_error_unless_the_user_cuts_it():
    message = error_of(KONKANI, "8gb", GPUS="3")
    assert "GPUS=3 does not divide an update of 8: take 2, 4 or 8" in message
    assert error_of(KONKANI, "8gb", "--batch_size", "3", GPUS="3") == message
    mine = ["--batch_size", "3", "--gradient_accumulation_steps=2"]
    assert flags_of(KONKANI, "8gb", *mine, GPUS="3")[-3:] == mine
    assert cut_of(flags_of(KONKANI, "8gb", "--batch_size", "4", GPUS="2")) == (4, 1)


@pytest.mark.parametrize(
    ("script", "use"),
    [
        (KONKANI, "--evaluate"),
        (MORSE, "--transcribe a.wav"),
        (MORSE, "--verify_gpu"),
        (PARAKEET, "--export d --resume best.safetensors"),
    ],
)
def test_what_does_not_train_runs_in_one_process(script, use):
    plain = answer(script, "16gb", *use.split()).command
    assert plain[0] == "python"
    for variables, several in ({"GPUS": "4"}, "GPUS=4"), (machine("1", "4"), "NODES=2 GPUS=4"):
        found = answer(script, "16gb", *use.split(), **variables)
        assert found.command == plain
        assert found.said == f"{several} is ignored: this command runs in one process\n"


@pytest.mark.parametrize(
    ("script", "goal"),
    [
        (MORSE, "--resume=best.pt --data_dir d"),
        (MORSE, "--resume auto"),
        (PARAKEET, "--resume best.pt --max_steps 9"),
        (XTTS, "--model_dir m --train_csv=t.csv"),
    ],
)
def test_an_export_after_training_runs_on_all_gpus(script, goal):
    found = answer(script, "16gb", "--export", "d", *goal.split(), GPUS="4")
    assert found.command[0] == "torchrun" and not found.said


@pytest.mark.parametrize(("gpus", "ranks"), [("", 2), ("1", 2), ("4", 8)])
def test_machines_share_an_update_and_meet_at_the_first(gpus, ranks):
    addresses = []
    for number in ("0", "1"):
        found = answer(PARAKEET, "24gb", "0.6b", "large_data", **machine(number, gpus))
        words = found.command
        assert words[:2] == [ONE_STORE, "torchrun"] and not found.said
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
        ({"GPUS": "0"}, "GPUS=0: it must be the number"),
        ({"GPUS": "two"}, "GPUS=two: it must be the number"),
        ({"NODES": "2"}, "NODES=2 NODE=: NODE must be this machine's number, 0 to 1"),
        ({"NODES": "2", "NODE": "2"}, "NODES=2 NODE=2: NODE must be this machine's number"),
        ({"NODES": "2", "NODE": "1"}, "HEAD=: it must be the address of machine 0 and a free port"),
        (machine("1") | {"HEAD": "a.b"}, "HEAD=a.b: it must be the address of machine 0 and a"),
        (machine("1", "3"), "NODES=2 GPUS=3 does not divide an update of 8"),
    ],
)
def test_a_wrong_number_or_machine_is_a_usage_error(variables, message):
    assert message in error_of(KONKANI, "8gb", **variables)


def test_more_gpus_than_divide_an_update_get_a_larger_one():
    for flags in ([], ["--dry_run", "a100"]):  # a plan is that of the run
        found = answer(PARAKEET, "a100", "0.6b", "large_data", *flags, **machine("1", "8"))
        assert 16 * update_of(found.command) == 128
        assert "update: 128 utterances, because 16 GPUs do not divide 120" in found.said
    assert cut_of(flags_of(PARAKEET, "a100", "demo", **machine("0", "8"))) == (1, 1)
    assert not answer(XTTS, "a100", "full", "large_data", *MODEL, **machine("0", "8")).said


def test_one_machine_starts_a_sharded_run_anew_and_others_as_ever():
    plain = answer(KONKANI, "8gb", GPUS="2").command
    assert answer(KONKANI, "8gb", GPUS="2", NODES="1").command == plain
    words = answer(KONKANI, "8gb", "--sharded", GPUS="2").command
    assert words[:2] == [ONE_STORE, "torchrun"] and "--standalone" in words
    assert int(value(words, "--max_restarts")) and words[-1] == "--sharded"
    assert answer(KONKANI, "8gb", "--sharded").command[0] == "python"


@pytest.mark.parametrize("script", SCRIPTS)
def test_sharded_excludes_nothing_of_a_row(script):
    for tier, size in places(script):
        row = row_of(script, tier, size)
        if set("8HGW") & set(row[2]):
            args = args_of(script, tier, size, *MODEL, *DATA, "--sharded")
            assert (args.optimizer, args.use_cpu_offload) == ("adamw", None)
            assert args.gradient_checkpointing == ("R" in row[2])


@pytest.mark.parametrize(
    ("flags", "variables", "cards", "batch"),
    [
        ("--dry_run 8GB", {"GPUS": "4"}, "4x8GB", 6),
        ("--dry_run=16gb --sharded", machine("0", "2"), "4x16gb", 5),
        ("--dry_run", {"GPUS": "2"}, "2x", 5),
        ("--dry_run 2x16gb", {}, "2x16gb", 5),
        ("--dry_run 8 x 16gb", {"GPUS": "2"}, "8 x 16gb", 5),
    ],
)
def test_a_plan_for_several_gpus_runs_in_one_process(flags, variables, cards, batch):
    tier = "8gb" if "8GB" in flags else "16gb"
    words = ["0.6b", "large_data", *flags.split()]
    found = answer(PARAKEET, tier, *words, **variables)
    assert found.command[0] == "python"
    assert resolved(PARAKEET, found.command[2:]).dry_run == cards
    assert update_of(found.command) * int(cards[0]) == UPDATES[PARAKEET]["0.6b"]
    assert cut_of(found.command)[0] == batch
    said = "" if cards in flags else f": one process plans for {cards}\n"
    assert found.said.endswith(said) and found.said.count("\n") == bool(said)


# --- the tier -------------------------------------------------------------------------------------


@pytest.fixture
def gpus(tmp_path, monkeypatch) -> Path:
    """The file that a stub for nvidia-smi reads: the memory of each GPU, a line each."""
    (tmp_path / "nvidia-smi").write_text(
        f"""#!{sys.executable} -SI
import sys
memory = open("{tmp_path}/memory").read().splitlines()
if not memory:
    sys.exit("NVIDIA-SMI has failed: no driver")
if "-i" in sys.argv:
    name = sys.argv[sys.argv.index("-i") + 1].removeprefix("GPU-")
    if not name.isdigit():
        sys.exit("No devices were found")
    memory = [memory[int(name)]]
print(*memory, sep="\\n")
"""
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "memory"


SEEN = """
81559 a100
40960 24gb
23028 24gb
16376 16gb
15109 t4
12288 8gb  # this table has no 12gb
7900 8gb
5900 6gb
2048 4gb
[N/A] 4gb
none cpu
"""
CHOSEN = [("1", "6gb"), ("1,0", "6gb"), ("GPU-1", "6gb"), ("0", "a100"), ("", "cpu"), ("-1", "cpu")]


def test_the_tier_follows_the_memory(gpus):
    for memory, tier in preset.read_rows(SEEN):
        gpus.write_text(memory.replace("none", ""))
        found = answer(KONKANI)
        assert found.said == f"tier: {tier} (auto)\n"
        # Torch has the last word on the GPU.
        device = ["--device", "auto"] if tier == "cpu" else []
        assert found.command[3 : 3 + len(device)] == device


@pytest.mark.parametrize(("visible", "tier"), [*CHOSEN, ("MIG-2f1a", "4gb")])
def test_the_tier_is_that_of_the_first_visible_gpu(gpus, visible, tier):
    gpus.write_text("81559\n6144")
    assert answer(KONKANI, CUDA_VISIBLE_DEVICES=visible).said == f"tier: {tier} (auto)\n"


def test_no_nvidia_smi_is_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert answer(KONKANI).said == answer(KONKANI, "auto").said == "tier: cpu (auto)\n"
    assert value(answer(KONKANI, "cpu").command, "--device") == "cpu"


@pytest.mark.parametrize("card", ["16GB", "16 gb", "2x16gb", "2 x 16GB", "4X16gb"])
def test_without_a_tier_the_card_of_a_plan_is_the_tier(card):
    found = answer(PARAKEET, "--dry_run", *card.split())
    assert found.said == "tier: 16gb (auto)\n"
    assert found.command == answer(PARAKEET, "16gb", "--dry_run", *card.split()).command
