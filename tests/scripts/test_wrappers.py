"""The preset scripts as a user runs them. Their tables are read by `--print`. The Python
environment is tested in a copy of the project with a stub for the recipe, made-up requirements and
interpreters with made-up packages: no network."""

import functools
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
import time
from pathlib import Path

import pytest

from benchmarks import tier_tables
from common import options
from recipes import konkani_conformer, parakeet_tdt, whisper_morse, whisper_vietnamese, xtts_amharic
from speech import recogniser

ROOT = Path(__file__).resolve().parents[2]
NAME = "run_training_memory_optimized.sh"
BASE = getattr(sys, "_base_executable", sys.executable)
TOOLS = "bash sh readlink head rm sed flock sleep touch cat chmod".split()
MET = {"torch": "2.11.0+cu130", "torchaudio": "2.11.0", "jiwer": "4.0.1"}
FAKE_PIP = """
import os, pathlib, re, subprocess, sys, sysconfig, time
def main(arguments):
    if arguments[0] == "--python":
        return subprocess.call([arguments[1], __file__, *arguments[2:]])
    with open(os.environ["PIP_LOG"], "a") as log:
        print(sys.prefix, file=log)
    if os.environ.get("PIP_FAILS") == "killed":
        os.kill(os.getpid(), 9)
    if os.environ.get("PIP_FAILS"):
        return "ERROR: no route to host"
    for flag, file in zip(arguments, arguments[1:]):
        for name, version in re.findall(r"(\\w+)>=([\\d.]+)", open(file).read()) if flag == "-r" else ():
            folder = pathlib.Path(sysconfig.get_path("purelib"), f"{name}-{version}.dist-info")
            folder.mkdir(exist_ok=True)
            (folder / "METADATA").write_text(f"Name: {name}\\nVersion: {version}\\n")
    started = time.monotonic()
    while not os.path.exists(os.environ.get("PIP_WAITS_FOR", "/")) and time.monotonic() < started + 60:
        time.sleep(0.01)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
FAKE_ENSUREPIP = """
import os, shutil, subprocess, sys, sysconfig
assert sys.argv[1:] == ["--default-pip"]
if sys.version_info < (3, 13):
    os.environ.pop("PYTHONSAFEPATH")  # as if this were Python 3.10, which ignores it
subprocess.run([sys.executable, "-c", "import re, runpy"], check=True)  # so does the real one
shutil.copytree(os.environ["FAKE_PIP"], sysconfig.get_path("purelib") + "/pip")
"""
FAKE_TORCHRUN = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "path": sys.path, "environment": [os.environ.get("OMP_NUM_THREADS")]}))
"""
FAKE_NVIDIA_SMI = """#!/bin/bash
# One word of CARDS for each GPU's memory; a GPU is named by its number or by GPU-<number>.
[ -n "$CARDS" ] || { echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9; }
[ "$CARDS" != none ] || { echo "No devices were found"; exit; }
gpus=($CARDS)
while [ $# -gt 0 ]; do
  if [ "$1" = -i ]; then
    number=${2#GPU-}
    [[ $number =~ ^[0-9]+$ ]] && [ "$number" -lt ${#gpus[@]} ] || { echo "No devices were found"; exit 6; }
    echo "${gpus[$number]}"; exit
  fi
  shift
done
printf '%s\\n' "${gpus[@]}"
"""


def script(path: Path, text: str) -> Path:
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
    script(
        path / "python3",
        f'#!/bin/sh\nPYTHONPATH="{":".join(map(str, paths))}" exec "{BASE}" -S "$@"\n',
    )
    return path


@pytest.fixture
def project(tmp_path):
    """A copy of what the scripts need, in a folder with a space and Devanagari in its name."""
    root = tmp_path / "a b हांव"
    (root / "common").mkdir(parents=True)
    for name in (NAME, "common/env.sh"):
        shutil.copy(ROOT / name, root / name)
    (root / "requirements.txt").write_text(
        "# a comment\ntorch>=2.8,<2.12\ntorchaudio>=2.8,<2.12\njiwer>=4,<5\n"
    )
    stub = """
    import json, os, sys
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    environment = [os.environ.get(n) for n in names]
    streams = [os.path.exists(f"/dev/fd/{n}") for n in range(3)]
    report = {"arguments": sys.argv[1:], "prefix": sys.prefix, "path": sys.path, "streams": streams}
    print(json.dumps({**report, "environment": environment}))
    """
    script(root / "recipes/konkani_conformer.py", textwrap.dedent(stub))
    for tool in TOOLS:
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / "tools" / tool).symlink_to(shutil.which(tool))
    script(tmp_path / "pip/pip/__main__.py", FAKE_PIP)
    script(tmp_path / "pip/pip/__init__.py", "")
    return root


def environment(project: Path, *path: Path, **extra) -> dict[str, str]:
    search = ":".join(map(str, [*path, project.parent / "tools"]))
    log = project.parent / "pip.log"
    return {
        "PATH": search,
        "HOME": str(project.parent),
        "LC_ALL": "C.UTF-8",
        "PIP_LOG": str(log),
        **extra,
    }


def run(
    project: Path, *arguments, path=(), command=None, cwd=None, **extra
) -> subprocess.CompletedProcess:
    command = command or [str(project / NAME)]
    return subprocess.run(
        [*command, *arguments],
        env=environment(project, *path, **extra),
        cwd=cwd or project.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def printed(result: subprocess.CompletedProcess) -> list[str]:
    """The arguments that the stub for the recipe was started with."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["arguments"]


def value(arguments: list[str], flag: str) -> str:
    """A flag's value as argparse would see it: the last one wins."""
    return arguments[len(arguments) - arguments[::-1].index(flag)]


def error_line(result: subprocess.CompletedProcess, status: int) -> str:
    assert result.returncode == status, (result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert result.stderr.rstrip().endswith(lines[0])
    return lines[0]


# --- the command ----------------------------------------------------------------------------------


def test_print_needs_no_python_and_can_be_pasted(project):
    result = run(
        project,
        "t4",
        "minimal",
        "--print",
        "--train_manifest",
        "my data/गोंय.json",
        "--learning_rate",
        "1e-4",
    )
    assert result.returncode == 0, result.stderr
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {result.stdout.strip()}"], capture_output=True, text=True
    )
    words = words.stdout.split("\0")[:-1]
    assert words[:2] == ["python", str(project / "recipes/konkani_conformer.py")]
    assert words[-4:] == ["--train_manifest", "my data/गोंय.json", "--learning_rate", "1e-4"]
    assert value(words, "--batch_size") == "2" and value(words, "--d_model") == "128"
    assert "--print" not in words


def test_works_from_anywhere_through_links_and_with_sh(project, tmp_path):
    link = tmp_path / "link.sh"
    link.symlink_to(project / NAME)
    expected = run(project, "t4", "--print").stdout
    assert shlex.split(expected)[1] == str(project / "recipes/konkani_conformer.py")
    for command, cwd in (
        ([str(link)], "/"),
        (["sh", NAME], project),
        (["bash", f"{project.name}/{NAME}"], tmp_path),
    ):
        assert run(project, "t4", "--print", command=command, cwd=cwd).stdout == expected
    # cd would look for the project in CDPATH, and print what it found.
    (tmp_path / "elsewhere" / project.name / "common").mkdir(parents=True)
    command = ["bash", "-euc", '. "$0/common/env.sh"; echo "$ROOT"', project.name]
    assert (
        run(project, command=command, CDPATH=str(tmp_path / "elsewhere")).stdout == f"{project}\n"
    )


def test_help_and_rows_need_no_python(project):
    for arguments in (["--help"], ["t4", "-h"]):
        result = run(project, *arguments)
        assert (
            result.returncode == 0
            and "SIZE: optimized (default), minimal, original" in result.stdout
        )
        assert "BASH_VERSION" not in result.stdout and not result.stderr
    result = run(project, "--rows")
    assert (
        result.returncode == 0 and "\nt4    *         2 4\n" in result.stdout and not result.stderr
    )


def test_a_users_flags_win_and_resume_is_added_only_if_nothing_is_loaded(project, tmp_path):
    path = [make_venv(tmp_path / "active", MET)]
    words = printed(
        run(project, "t4", "--batch_size", "1", "--gradient_accumulation_steps", "8", path=path)
    )
    assert (value(words, "--batch_size"), value(words, "--gradient_accumulation_steps")) == (
        "1",
        "8",
    )
    assert words[-6:-4] == ["--resume", "auto"]
    for given in (
        ["--resume", "a.pt"],
        ["--resume=a.pt"],
        ["--init_from", "a.pt"],
        ["--transcribe", "a.wav"],
    ):
        words = shlex.split(run(project, "t4", *given, "--print").stdout)
        assert words[-len(given) :] == given and "auto" not in words


# --- the rows -------------------------------------------------------------------------------------

KONKANI, VIETNAMESE, MORSE, PARAKEET = (
    NAME,
    "run_whisper_vietnamese.sh",
    "run_whisper_morse.sh",
    "run_parakeet_tdt.sh",
)
XTTS = "run_xtts_amharic.sh"
RECIPES = {
    KONKANI: konkani_conformer,
    VIETNAMESE: whisper_vietnamese,
    MORSE: whisper_morse,
    PARAKEET: parakeet_tdt,
    XTTS: xtts_amharic,
}
WHISPERS = [VIETNAMESE, MORSE]
RECOGNISERS = [*WHISPERS, PARAKEET]
WITH_DEMO = [*RECOGNISERS, XTTS]
# In the tables' order.
TIERS = {
    KONKANI: "4gb 6gb 8gb t4 16gb 24gb a100 cpu".split(),
    VIETNAMESE: "4gb 6gb 8gb 16gb 24gb a100 cpu".split(),
    MORSE: "4gb 6gb 8gb 16gb 24gb 32gb cpu".split(),
    PARAKEET: "8gb 16gb 24gb a100 cpu".split(),
    XTTS: "8gb 12gb 16gb 24gb a100 cpu".split(),
}
SIZES = {
    KONKANI: "minimal optimized original".split(),
    VIETNAMESE: "demo tiny base small medium large turbo".split(),
    MORSE: "demo tiny base small many medium large turbo".split(),
    PARAKEET: "demo 110m 0.6b".split(),
    XTTS: "demo full small_data".split(),
}
TOO_LARGE = {
    ("8gb", "large"),
    *((tier, size) for tier in ("4gb", "6gb") for size in ("medium", "large", "turbo")),
}
UPDATES = {KONKANI: 8, VIETNAMESE: 24, MORSE: 96, PARAKEET: 120}
DEMO_UPDATES = {VIETNAMESE: 16, MORSE: 24, PARAKEET: 8, XTTS: 16}
# A row that has 8, and another size.
LETTERED = {
    VIETNAMESE: ("16gb", "turbo", "tiny"),
    MORSE: ("16gb", "turbo", "tiny"),
    PARAKEET: ("8gb", "0.6b", "110m"),
}
MODEL, DATA = (
    ["--model_dir", str(ROOT)],
    ["--train_manifest", "train.json"],
)  # resolving looks for the folder


@functools.cache
def answer_of(wrapper: str, *arguments: str, gpus: str = "") -> subprocess.CompletedProcess:
    command = [str(ROOT / wrapper), *arguments, "--print"]
    extra = {"env": {**os.environ, "GPUS": gpus}, "cwd": "/"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **extra)


def command_of(wrapper: str, *arguments: str, status: int = 0, gpus: str = "") -> list[str]:
    """The flags that a script would start its recipe with, or the words of its error."""
    result = answer_of(wrapper, *arguments, gpus=gpus)
    if status:
        return error_line(result, status).split()
    assert result.returncode == 0, result.stderr
    words = result.stdout.split()
    launcher = (
        ["torchrun", "--standalone", "--nproc_per_node", gpus]
        if words[0] == "torchrun"
        else ["python"]
    )
    start = [*launcher, str(ROOT / "recipes" / Path(RECIPES[wrapper].__file__).name)]
    assert words[: len(start)] == start
    return words[len(start) :]


def resolved(wrapper: str, words: list[str]):
    """The recipe's namespace for these flags."""
    recipe, parser = RECIPES[wrapper], options.Parser("test")
    recipe.add_arguments(parser)
    args = parser.parse_args(words)
    recipe.resolve(args)
    return args


def cut_of(words: list[str]) -> tuple[int, int]:
    return int(value(words, "--batch_size")), int(value(words, "--gradient_accumulation_steps"))


def of_update(words: list[str]) -> int:
    batch, accumulation = cut_of(words)
    return batch * accumulation


@pytest.mark.parametrize("wrapper", RECIPES)
def test_help_names_every_tier_and_size_of_the_table(wrapper):
    rows = subprocess.run(
        [ROOT / wrapper, "--rows"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in rows.splitlines() if line and not line.startswith("#")]
    for column, names in ((0, TIERS[wrapper]), (1, SIZES[wrapper])):
        assert {row[column] for row in rows} - {"*"} == set(names)
    for command in ([str(ROOT / wrapper)], ["sh", wrapper]):
        result = subprocess.run(
            [*command, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert (
            result.returncode == 0
            and f"./{wrapper} [TIER] [SIZE]" in result.stdout
            and not result.stderr
        )
    words = re.findall(r"\w[\w.]*\b", result.stdout.partition("TIER: ")[2])
    assert {*TIERS[wrapper], *SIZES[wrapper]} <= set(
        words
    ) and f"GPUS=2 ./{wrapper}" in result.stdout


def test_konkanis_sizes_are_the_guides_in_every_tier():
    for tier in TIERS[KONKANI]:
        for size, shape in {
            "optimized": (192, 8, 4),
            "minimal": (128, 6, 3),
            "original": (256, 12, 6),
        }.items():
            words = command_of(KONKANI, tier, size)
            args = resolved(KONKANI, words)
            assert (args.d_model, args.encoder_layers, args.decoder_layers) == shape and of_update(
                words
            ) == 8
            assert args.device == ("cpu" if tier == "cpu" else "auto")
            assert (args.mixed_precision, args.empty_cache_every, args.resume) == (
                "auto",
                50,
                "auto",
            )
    assert cut_of(command_of(KONKANI, "t4")) == (2, 4)
    assert command_of(KONKANI, "t4") == command_of(KONKANI, "t4", "optimized")


@pytest.mark.parametrize(
    ("wrapper", "tier"), [(wrapper, tier) for wrapper in WHISPERS for tier in TIERS[wrapper]]
)
def test_every_row_of_whisper_has_the_same_update_and_is_understood(wrapper, tier):
    for size in "tiny base small medium large turbo".split():
        needs_model = (tier, size) in {("8gb", "medium"), ("8gb", "turbo"), ("16gb", "large")}
        if (tier, size) in TOO_LARGE:
            message = error_line(answer_of(wrapper, tier, size, *MODEL), 2)
            fitting = "turbo, medium or small" if tier == "8gb" else "small, base or tiny"
            assert message == f"error: {size} does not fit in tier {tier}: take {fitting}"
            continue
        words = command_of(wrapper, tier, size, *MODEL)
        args = resolved(wrapper, words)
        assert (
            of_update(words) == UPDATES[wrapper]
            and not args.from_scratch
            and args.model_size is None
        )
        assert args.freeze_encoder == needs_model and args.learning_rate is None
        assert args.device == ("cpu" if tier == "cpu" else "auto")
        if needs_model:
            message = " ".join(command_of(wrapper, tier, size, status=2))
            assert f"{size} fits in tier {tier} only with a frozen encoder" in message
        else:
            words = command_of(wrapper, tier, size, *DATA)
            args = resolved(wrapper, words)
            assert of_update(words) == UPDATES[wrapper] and args.from_scratch
            assert args.model_size == {"large": "large-v3"}.get(size, size)


@pytest.mark.parametrize("wrapper", WITH_DEMO)
def test_without_model_and_data_a_script_runs_the_recipes_own_demo_in_every_tier(wrapper):
    for words in [[], *([tier] for tier in TIERS[wrapper]), ["auto", "demo"], ["8gb", "demo"]]:
        found = command_of(wrapper, *words)
        args, plain = (
            resolved(wrapper, found),
            resolved(wrapper, ["--from_scratch"] if wrapper == XTTS else []),
        )
        assert (args.model_size, args.max_steps) == ("demo", RECIPES[wrapper].DEMO_STEPS)
        assert of_update(found) == DEMO_UPDATES[wrapper] and args.from_scratch == (wrapper == XTTS)
        assert (
            args.warmup_steps is args.learning_rate is None and "--max_target_tokens" not in found
        )
        assert (args.eval_every, args.save_every) == (plain.eval_every, plain.save_every)
        assert found[-2:] == ["--resume", "auto"]
    for given in (MODEL, DATA):
        assert "size demo" in " ".join(command_of(wrapper, "cpu", "demo", *given, status=2))


def row_of(wrapper: str, tier: str, size: str) -> tuple[int, int, str]:
    """Micro-batch, accumulation and letters of a row, as `benchmarks` reads it."""
    batch, accumulation, *rest = tier_tables.row_of(
        tier_tables.read_rows(Path(wrapper).name), tier, size
    )[2:]
    letters = itertools.takewhile(lambda word: not word.startswith("--"), rest)
    return int(batch), int(accumulation), "".join(letters)


def test_vietnamese_defaults_are_the_guides():
    args = resolved(VIETNAMESE, command_of(VIETNAMESE, "8gb", *DATA))
    assert (args.model_size, args.from_scratch, args.learning_rate) == ("base", True, 1e-4)
    assert (args.warmup_steps, args.max_steps, args.save_every, args.keep_last) == (
        1000,
        50_000,
        1000,
        5,
    )
    assert (args.max_target_tokens, args.lr_schedule, args.mixed_precision) == (
        256,
        "cosine",
        "auto",
    )
    assert (
        args.batch_size * args.gradient_accumulation_steps == 6 * 4
    )  # the guide's; all at once fit
    args = resolved(
        VIETNAMESE, command_of(VIETNAMESE, "8gb", "tiny", *DATA, *MODEL, "--num_epochs", "3")
    )
    assert (args.num_epochs, args.max_steps, args.learning_rate, args.warmup_steps) == (
        3,
        None,
        None,
        1000,
    )


def test_morse_rows_are_the_guides():
    """The update and the data workers; micro-batches are as large as they are planned to fit."""
    for words, expected in {
        ("16gb", "small"): (96, 6),
        ("32gb", "small"): (96, 6),
        ("32gb", "medium"): (96, 6),
        ("32gb", "large"): (96, 6),
        ("32gb", "many"): (256, 8),
        ("8gb", "small"): (96, "auto"),
    }.items():
        found = command_of(MORSE, *words, *MODEL)
        assert (of_update(found), resolved(MORSE, found).dataloader_num_workers) == expected
    for tier in TIERS[MORSE]:
        words = command_of(MORSE, tier, "many", "--conditions", "wide")
        args = resolved(MORSE, words)
        assert (
            of_update(words) == 256 and args.model_size == "small" and args.conditions == ["wide"]
        )
        assert words.count("--dataloader_num_workers") == (tier in ("16gb", "24gb", "32gb"))
    assert resolved(MORSE, command_of(MORSE, "24gb", "--conditions", "wide")).model_size == "small"


@pytest.mark.parametrize("tier", TIERS[PARAKEET])
def test_every_row_of_parakeet_has_the_same_update_and_is_understood(tier):
    for size in SIZES[PARAKEET][1:]:
        batch, accumulation, letters = row_of(PARAKEET, tier, size)
        evaluated = {"8gb 0.6b": 4, "24gb 0.6b": 10, "a100 110m": 10, "a100 0.6b": 10}.get(
            f"{tier} {size}", 8
        )
        for given in (
            [],
            MODEL,
            ["--model_file", __file__],
            DATA,
            ["--from_scratch"],
            [*MODEL, *DATA],
        ):
            words = command_of(PARAKEET, tier, size, *given)
            args = resolved(PARAKEET, words)
            assert (
                cut_of(words)
                == (args.batch_size, args.gradient_accumulation_steps)
                == (batch, accumulation)
            )
            assert of_update(words) == UPDATES[PARAKEET]
            assert args.gradient_checkpointing == ("R" in letters) and args.use_cpu_offload == (
                "H" in letters
            )
            assert args.optimizer == ("adamw_8bit" if "8" in letters else "adamw")
            assert args.eval_batch_size == evaluated
            assert (
                args.device == ("cpu" if tier == "cpu" else "auto")
                and args.mixed_precision == "auto"
            )
            assert (args.output_dir, args.resume, args.learning_rate) == (
                "runs/parakeet_tdt",
                "auto",
                None,
            )
            start = ["--from_scratch", "--model_size", size]
            has_model = bool({"--model_dir", "--model_file"} & set(given))
            assert (" ".join(start) in " ".join(words)) != has_model
            assert (args.from_scratch, args.model_size) == (
                (False, None) if has_model else (True, size)
            )
            if given and size == "0.6b":
                assert command_of(PARAKEET, tier, *given) == words
    folder = ["--output_dir", "elsewhere"]
    assert resolved(PARAKEET, command_of(PARAKEET, tier, *MODEL, *folder)).output_dir == "elsewhere"


@pytest.mark.parametrize("size", ["full", "small_data"])
@pytest.mark.parametrize("tier", TIERS[XTTS])
def test_every_row_of_xtts_has_the_same_update_and_is_understood(tier, size):
    batch, accumulation, letters = row_of(XTTS, tier, size)
    csv = ["--train_csv", "train.csv", "--eval_csv", "val.csv"]
    for given in (
        [],
        MODEL,
        [*MODEL, *DATA],
        [*MODEL, *csv],
        ["--from_scratch"],
        ["--from_scratch", *DATA],
        csv,
    ):
        words = command_of(XTTS, tier, size, *given)
        args = resolved(XTTS, words)
        assert (
            cut_of(words)
            == (args.batch_size, args.gradient_accumulation_steps)
            == (batch, accumulation)
        )
        assert of_update(words) == {"full": 240, "small_data": 8}[size]
        assert (
            args.gradient_checkpointing == ("R" in letters)
            and not args.use_cpu_offload
            and args.sdpa
        )
        assert args.optimizer == ("adamw_8bit" if "8" in letters else "adamw")
        assert (
            args.device == ("cpu" if tier == "cpu" else "auto") and args.mixed_precision == "auto"
        )
        assert (args.output_dir, args.resume, args.learning_rate) == (
            "runs/xtts_amharic",
            "auto",
            None,
        )
        # Random weights are for tests, so nothing but their flag asks for them.
        is_new = "--from_scratch" in given
        assert (args.from_scratch, args.model_size) == ((True, "full") if is_new else (False, None))
        if size == "full":
            assert (
                args.early_stopping_patience == (0 if "--from_scratch" in words else 5)
                and args.warmup_steps is None
            )
            assert (args.num_epochs, args.max_steps) == (
                (100, None) if {DATA[0], csv[0]} & set(given) else (None, 200)
            )
            assert not given or command_of(XTTS, tier, *given) == words
        else:
            assert (args.num_epochs, args.max_steps, args.warmup_steps) == (20, None, 50)
            assert args.early_stopping_patience == 3
        assert (args.eval_every == 0) == (args.train_manifest is not None)  # 0: each epoch


def test_xttss_flags_of_the_replaced_project_win_over_the_rows():
    names = (
        "--output_path there --grad_acumm 2 --batch_size 8 --num_epochs 10 --enable_grad_checkpoint"
        " --enable_sdpa"
    )
    words = command_of(
        XTTS,
        "16gb",
        "small_data",
        *MODEL,
        "--train_csv",
        "t.csv",
        *names.split(),
        "--enable_mixed_precision",
    )
    args = resolved(XTTS, words)
    assert (args.output_dir, args.gradient_accumulation_steps, args.batch_size) == ("there", 2, 8)
    assert (args.num_epochs, args.warmup_steps, args.mixed_precision) == (10, 50, "auto")
    assert args.gradient_checkpointing and args.sdpa
    args = resolved(
        XTTS, command_of(XTTS, "8gb", *MODEL, "--use_cpu_offload", "--no_gradient_checkpointing")
    )
    assert args.optimizer == "adamw" and args.use_cpu_offload and not args.gradient_checkpointing
    args = resolved(
        XTTS,
        command_of(
            XTTS, "16gb", *MODEL, "--optimizer", "adamw_8bit", "--no_sdpa", "--no_mixed_precision"
        ),
    )
    assert args.optimizer == "adamw_8bit" and not args.sdpa and args.mixed_precision == "no"
    # A model that is resumed has its own shape and start.
    for given in (["--resume", "a.pt"], ["--from_scratch", "--resume", "a.pt"]):
        words = command_of(XTTS, "8gb", *given)
        assert words[-len(given) :] == given and words.count("--from_scratch") == given.count(
            "--from_scratch"
        )
        assert "--model_size" not in words and "auto" not in words
    words = command_of(XTTS, "8gb", *MODEL, *DATA, "--init_from", "a.pt")
    assert (
        "auto" not in words and of_update(words) == 240 and not resolved(XTTS, words).from_scratch
    )
    assert (
        resolved(XTTS, command_of(XTTS, "8gb", "--from_scratch", "--model_size", "demo")).model_size
        == "demo"
    )


@pytest.mark.parametrize("wrapper", RECOGNISERS)
def test_a_users_flags_win_over_the_rows(wrapper):
    tier, size, other = LETTERED[wrapper]
    words = command_of(
        wrapper, tier, size, *MODEL, "--batch_size", "1", "--no_gradient_checkpointing"
    )
    args = resolved(wrapper, words)
    assert (
        args.batch_size == 1 and not args.gradient_checkpointing and args.optimizer == "adamw_8bit"
    )
    # A user's option takes the place of the row's that it excludes.
    args = resolved(wrapper, command_of(wrapper, tier, size, *MODEL, "--use_cpu_offload"))
    assert args.optimizer == "adamw" and args.use_cpu_offload
    offloaded = ("8gb", size) if wrapper == PARAKEET else ("4gb", "small")
    args = resolved(wrapper, command_of(wrapper, *offloaded, *MODEL, "--optimizer", "adamw_8bit"))
    assert args.optimizer == "adamw_8bit" and not args.use_cpu_offload
    args = resolved(
        wrapper, command_of(wrapper, "cpu", *DATA, f"--model_size={other}", "--learning_rate=1e-3")
    )
    assert (args.model_size, args.learning_rate) == (other, 1e-3)
    words = command_of(wrapper, "8gb", *DATA, "--resume", "a.pt")
    assert (
        words[-2:] == ["--resume", "a.pt"] and "auto" not in words and "--model_size" not in words
    )
    assert "auto" not in command_of(wrapper, "8gb", *DATA, "--init_from", "a.pt")


@pytest.mark.parametrize("wrapper", RECIPES)
def test_using_a_model_brings_no_flags_of_training(wrapper):
    uses = [
        ["--transcribe", "a.wav"],
        ["--evaluate"],
        ["--evaluate", "--test_manifest", "test.json"],
    ]
    if wrapper == MORSE:
        uses.append(["--write_dataset", "d", "9"])
    if wrapper == XTTS:
        uses = [
            [
                "--synthesize",
                "selam",
                "--speaker_wav",
                __file__,
                __file__,
                "--output",
                "c.wav",
                *more,
            ]
            for more in ([], MODEL)
        ]
    plain = ["--mixed_precision"]
    folder = (
        []
        if wrapper == KONKANI
        else ["--output_dir", f"runs/{Path(RECIPES[wrapper].__file__).stem}"]
    )
    for use in uses:
        assert command_of(wrapper, "cpu", *use) == [*plain, "--device", "cpu", *folder, *use]
        assert command_of(wrapper, "8gb", SIZES[wrapper][-2], *use) == [*plain, *folder, *use]
        resolved(wrapper, command_of(wrapper, "cpu", *use))
    # This checks the machine for a run, so it has the run's flags.
    for check in (["--verify_gpu"], ["--dry_run", "8GB"], ["--dry_run"]):
        assert command_of(wrapper, "8gb", *check) == [*command_of(wrapper, "8gb"), *check]
    assert resolved(wrapper, command_of(wrapper, "cpu", "--verify_gpu")).verify_gpu


@pytest.mark.parametrize("wrapper", RECIPES)
def test_wrong_words_are_usage_errors(wrapper):
    for word in ("small", "T4", ""):
        message = " ".join(command_of(wrapper, word, status=2))
        assert message.endswith(
            f"no tier '{word}': it is auto, {', '.join(TIERS[wrapper][:-1])} or cpu; a size comes"
            " after it"
        )
    message = " ".join(command_of(wrapper, "8gb", "huge", status=2))
    assert message.endswith(
        f"no size 'huge': it is {', '.join(SIZES[wrapper][:-1])} or {SIZES[wrapper][-1]}"
    )


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
    tier_and_size "$@"; shift "$words"; pick_row "$tier" "${size:-small}" "$@"; run any "$@" --print"""
    letters = "--gradient_checkpointing --use_cpu_offload --keep_last 3 --eval_batch_size 8"
    for words, expected in {
        "big": letters,
        "big small": letters,
        "big --optimizer adamw": letters.replace("--use_cpu_offload ", "") + " --optimizer adamw",
    }.items():
        result = run(project, *words.split(), command=["bash", "-euc", preset, str(project)])
        cut = "--batch_size 4 --gradient_accumulation_steps 2"
        assert shlex.split(result.stdout)[2:] == f"--mixed_precision {cut} {expected}".split()
    command = ["bash", "-euc", preset.replace("*     *     2 4", "tiny  small 2 4"), str(project)]
    message = error_line(run(project, "big", "huge", command=command), 2)
    assert message == "error: huge does not fit in tier big: take small or tiny"
    assert "huge has no row in tier tiny" in error_line(
        run(project, "tiny", "huge", command=command), 2
    )
    assert value(run(project, "tiny", command=command).stdout.split(), "--keep_last") == "3"
    command = ["bash", "-euc", preset.replace("4 2 R H", "4 2 R X"), str(project)]
    assert error_line(run(project, "big", command=command), 1).endswith(
        "size small has an unknown letter, X"
    )


# --- several GPUs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "tier"), [(wrapper, tier) for wrapper in RECIPES for tier in TIERS[wrapper]]
)
def test_several_gpus_share_the_update_of_every_row(wrapper, tier):
    for size in SIZES[wrapper]:
        model = [] if size == "demo" or wrapper == KONKANI else MODEL
        if (tier, size) in TOO_LARGE:
            continue
        one = command_of(wrapper, tier, size, *model)
        batch, accumulation = (
            one.index(f"--{name}") + 1 for name in ("batch_size", "gradient_accumulation_steps")
        )
        for gpus in (2, 4, 8) if wrapper in (PARAKEET, XTTS) else (8,):
            words = command_of(wrapper, tier, size, *model, gpus=str(gpus))
            assert (
                of_update(words) * gpus == of_update(one) and cut_of(words)[0] <= cut_of(one)[0]
            ), (tier, size)
            words[batch], words[accumulation] = one[batch], one[accumulation]
            assert words == one


@pytest.mark.parametrize(
    ("wrapper", "words", "gpus", "cut"),
    [
        (KONKANI, "16gb", "2", (4, 1)),
        (KONKANI, "t4", "2", (2, 2)),
        (KONKANI, "t4", "8", (1, 1)),
        (VIETNAMESE, "24gb tiny", "8", (3, 1)),
        (VIETNAMESE, "8gb small", "4", (3, 2)),
        (VIETNAMESE, "8gb base", "4", (6, 1)),
        (VIETNAMESE, "16gb small", "2", (12, 1)),
        (VIETNAMESE, "16gb small", "3", (8, 1)),
        (VIETNAMESE, "cpu", "2", (8, 1)),
        (MORSE, "32gb many", "8", (32, 1)),
        (MORSE, "24gb medium", "3", (4, 8)),
        (MORSE, "cpu", "4", (6, 1)),
        *(
            (PARAKEET, "a100 0.6b", gpus, cut)
            for gpus, cut in {"2": (60, 1), "4": (30, 1), "8": (15, 1)}.items()
        ),
        *(
            (PARAKEET, "24gb 0.6b", gpus, cut)
            for gpus, cut in {"2": (12, 5), "4": (10, 3), "8": (5, 3)}.items()
        ),
        *(
            (PARAKEET, "8gb 0.6b", gpus, cut)
            for gpus, cut in {"2": (6, 10), "4": (6, 5), "8": (5, 3)}.items()
        ),
        (PARAKEET, "16gb --from_scratch", "4", (5, 6)),
        (PARAKEET, "cpu 0.6b", "8", (3, 5)),
        (PARAKEET, "8gb", "8", (1, 1)),
        *(
            (XTTS, "8gb full", gpus, cut)
            for gpus, cut in {"2": (20, 6), "4": (20, 3), "8": (15, 2)}.items()
        ),
        *(
            (XTTS, "12gb full", gpus, cut)
            for gpus, cut in {"2": (30, 4), "4": (30, 2), "8": (30, 1)}.items()
        ),
        *(
            (XTTS, "a100 --from_scratch", gpus, cut)
            for gpus, cut in {"2": (60, 2), "4": (60, 1), "8": (30, 1)}.items()
        ),
        (XTTS, "16gb full", "3", (8, 10)),
        (XTTS, "16gb small_data", "4", (2, 1)),
        (XTTS, "cpu", "8", (2, 1)),
    ],
)
def test_a_gpus_share_is_in_the_largest_micro_batches_that_divide_it(wrapper, words, gpus, cut):
    result = answer_of(wrapper, *words.split(), gpus=gpus)
    assert result.stdout.startswith(
        f"torchrun --standalone --nproc_per_node {gpus} {ROOT}/recipes/"
    )
    assert cut_of(result.stdout.split()) == cut and not result.stderr


def test_without_a_tier_the_card_of_a_plan_is_the_tier():
    plan = ("--dry_run", "8GB")
    assert (
        command_of(KONKANI, *plan)
        == command_of(KONKANI, "auto", *plan)
        == command_of(KONKANI, "8gb", *plan)
    )
    assert command_of(KONKANI, "16gb", *plan) == [*command_of(KONKANI, "16gb"), *plan]
    assert command_of(PARAKEET, "auto", "0.6b", *plan, *MODEL) == command_of(
        PARAKEET, "8gb", "0.6b", *plan, *MODEL
    )


def test_one_gpu_needs_no_torchrun():
    assert command_of(KONKANI, "8gb", gpus="1") == command_of(KONKANI, "8gb", gpus="")
    assert answer_of(KONKANI, "8gb", gpus="1").stdout.startswith("python ")


@pytest.mark.parametrize("gpus", ["0", "-2", "two", "1.5", "08", "2 ", "81559 6144", "1" * 20])
def test_gpus_is_a_number(gpus):
    assert f"error: GPUS={gpus}: it must be the number" in error_line(
        answer_of(KONKANI, "8gb", gpus=gpus), 2
    )


def test_an_update_that_gpus_does_not_divide_is_a_usage_error_unless_the_user_cuts_it():
    message = error_line(answer_of(KONKANI, "8gb", gpus="3"), 2)
    assert "GPUS=3 does not divide an update of 8: take 2, 4 or 8" in message
    assert error_line(answer_of(KONKANI, "8gb", "--batch_size", "3", gpus="3"), 2) == message
    words = command_of(
        KONKANI, "8gb", "--batch_size", "3", "--gradient_accumulation_steps=2", gpus="3"
    )
    assert value(words, "--batch_size") == "3" and words[-1] == "--gradient_accumulation_steps=2"
    assert cut_of(command_of(KONKANI, "8gb", "--batch_size", "4", gpus="2")) == (4, 1)


EXPORT = "--export d --resume best.safetensors"


@pytest.mark.parametrize(
    ("wrapper", "use"),
    [
        *(
            (w, use)
            for w in (MORSE, PARAKEET)
            for use in ("--transcribe a.wav", "--evaluate", "--verify_gpu", EXPORT)
        ),
        *((wrapper, "--dry_run 8GB") for wrapper in (MORSE, PARAKEET, XTTS)),
        (MORSE, "--write_dataset d 9"),
        (PARAKEET, f"{EXPORT} --export_format nemo"),
        (XTTS, EXPORT),
        (XTTS, "--verify_gpu"),
        (XTTS, f"--export d --model_dir {ROOT}"),
        (XTTS, "--synthesize selam --speaker_wav a.wav"),
    ],
)
def test_what_does_not_train_runs_in_one_process(wrapper, use):
    result = answer_of(wrapper, "16gb", *use.split(), gpus="4")
    assert result.returncode == 0 and result.stdout.startswith("python ")
    assert result.stderr == "GPUS=4 is ignored: this command runs in one process\n"
    assert command_of(wrapper, "16gb", *use.split(), gpus="4") == command_of(
        wrapper, "16gb", *use.split()
    )


@pytest.mark.parametrize("tier", TIERS[PARAKEET])
def test_parakeets_export_alone_does_not_train(tier):
    start = [*(["--device", "cpu"] if tier == "cpu" else []), "--output_dir", "runs/parakeet_tdt"]
    for use in (EXPORT.split(), [*EXPORT.split(), "--export_format", "nemo"]):
        for size in ([], ["0.6b"]):
            words = command_of(PARAKEET, tier, *size, *use)
            args = resolved(PARAKEET, words)
            assert words == ["--mixed_precision", *start, *use]
            assert recogniser.exports_only(args.export, args.resume, None, args.given)


@pytest.mark.parametrize("tier", TIERS[XTTS])
def test_xttss_export_alone_does_not_train(tier):
    start = [*(["--device", "cpu"] if tier == "cpu" else []), "--output_dir", "runs/xtts_amharic"]
    for goal in ([], DATA, ["--train_csv", "train.csv"], ["--max_steps", "9"], ["--from_scratch"]):
        use = [*EXPORT.split(), *goal]
        words = command_of(XTTS, tier, *use)
        parser = options.Parser("test")
        xtts_amharic.add_arguments(parser)
        run = xtts_amharic.resolve(parser.parse_args(words))
        is_alone = recogniser.exports_only(run.export, run.resume, run.model_dir, run.given)
        assert is_alone == (not goal) == (words == ["--mixed_precision", *start, *use])


@pytest.mark.parametrize(
    ("wrapper", "goal"),
    [
        (MORSE, "--resume=best.pt --data_dir d"),
        (PARAKEET, "--resume=best.pt --train_manifest train.json"),
        (XTTS, "--model_dir m --train_csv=t.csv"),
        (XTTS, "--model_dir m --resume auto"),
        *(
            (w, goal)
            for w in (MORSE, PARAKEET)
            for goal in ("--resume auto", "--resume best.pt --max_steps 9")
        ),
    ],
)
def test_an_export_after_training_runs_on_all_gpus(wrapper, goal):
    result = answer_of(wrapper, "16gb", "--export", "d", *goal.split(), gpus="4")
    assert result.stdout.startswith("torchrun ") and not result.stderr


def test_gpus_starts_torchs_launcher(project, tmp_path):
    """With the launcher's flags, the recipe and its flags. tests/recipes/test_konkani_commands.py
    runs the real launcher."""
    active = make_venv(tmp_path / "active", MET)
    script(next((tmp_path / "active").glob("lib/*/*")) / "torch/distributed/run.py", FAKE_TORCHRUN)
    words = ["t4", "--learning_rate", "1e-4"]
    result = run(project, *words, path=[active], GPUS="2")
    launcher = [
        "--standalone",
        "--nproc_per_node",
        "2",
        str(project / "recipes/konkani_conformer.py"),
    ]
    assert (
        printed(result) == [*launcher, *command_of(KONKANI, *words, gpus="2")] and not result.stderr
    )
    assert json.loads(result.stdout)["environment"] == ["1"]


# --- the tier -------------------------------------------------------------------------------------

NO_GPU = "-1 NoDevFiles 1 GPU-7".split()


def test_every_script_picks_from_the_tiers_of_its_table(project, tmp_path):
    script(tmp_path / "driver/nvidia-smi", FAKE_NVIDIA_SMI)
    for wrapper in WITH_DEMO:
        shutil.copy(ROOT / wrapper, project / wrapper)
    for memory, *tiers in (
        ("81559", "32gb", "a100", "a100", "a100"),
        ("40960", "32gb", "24gb", "24gb", "24gb"),
        ("32607", "32gb", "24gb", "24gb", "24gb"),
        ("24564", "24gb", "24gb", "24gb", "24gb"),
        ("16376", "16gb", "16gb", "16gb", "16gb"),
        ("15360", "8gb", "8gb", "8gb", "12gb"),
        ("12282", "8gb", "8gb", "8gb", "12gb"),
        ("11264", "8gb", "8gb", "8gb", "8gb"),
        ("8151", "8gb", "8gb", "8gb", "8gb"),
        ("6144", "6gb", "6gb", "8gb", "8gb"),
        ("4096", "4gb", "4gb", "8gb", "8gb"),
        ("", "cpu", "cpu", "cpu", "cpu"),
    ):
        for wrapper, tier in zip((MORSE, VIETNAMESE, PARAKEET, XTTS), tiers, strict=True):
            result = run(
                project,
                "--print",
                command=[str(project / wrapper)],
                path=[tmp_path / "driver"],
                CARDS=memory,
            )
            assert result.returncode == 0 and result.stderr == f"tier: {tier} (auto)\n"


@pytest.mark.parametrize(
    "cards, visible, tier",
    [
        ("81559", None, "a100"),
        ("81920", None, "a100"),
        ("40960", None, "24gb"),
        ("24564", None, "24gb"),
        ("23028", None, "24gb"),
        ("16376", None, "16gb"),
        ("16384", None, "16gb"),
        ("15360", None, "t4"),
        ("15109", None, "t4"),
        ("12288", None, "t4"),
        ("8192", None, "8gb"),
        ("7900", None, "8gb"),
        ("6144", None, "6gb"),
        ("5900", None, "6gb"),
        ("4096", None, "4gb"),
        ("3900", None, "4gb"),
        ("2048", None, "4gb"),
        ("22000", None, "24gb"),
        ("[N/A]", None, "4gb"),
        ("", None, "cpu"),
        ("none", None, "cpu"),
        ("81559 6144", "1", "6gb"),
        ("81559 6144", "1,0", "6gb"),
        ("81559 6144", "GPU-1", "6gb"),
        ("6144 81559", "0", "6gb"),
        ("81559", "", "cpu"),
        ("81559", "MIG-2f1a", "4gb"),
        ("", "MIG-2f1a", "cpu"),
        *(("81559", name, "cpu") for name in NO_GPU),
    ],
)
def test_the_tier_follows_the_first_visible_gpu(project, tmp_path, cards, visible, tier):
    script(tmp_path / "driver/nvidia-smi", FAKE_NVIDIA_SMI)
    extra = (
        {"CARDS": cards} if visible is None else {"CARDS": cards, "CUDA_VISIBLE_DEVICES": visible}
    )
    result = run(project, "--print", path=[tmp_path / "driver"], **extra)
    assert result.returncode == 0 and result.stderr == f"tier: {tier} (auto)\n"
    # If there is no tier to be found, torch has the last word on the GPU; a tier that was asked for
    # is not argued with.
    assert (
        value(result.stdout.split(), "--device") == "auto"
        if tier == "cpu"
        else "--device" not in result.stdout
    )


def test_no_nvidia_smi_is_the_cpu(project):
    assert run(project, "auto", "--print").stderr == "tier: cpu (auto)\n"
    assert value(run(project, "cpu", "--print").stdout.split(), "--device") == "cpu"


# --- the environment ------------------------------------------------------------------------------


def test_the_active_interpreter_is_used_where_it_has_everything(project, tmp_path):
    result = run(project, "t4", path=[make_venv(tmp_path / "active", MET)])
    assert result.returncode == 0 and not result.stderr
    assert json.loads(result.stdout)["prefix"] == str(tmp_path / "active")
    assert not (project / ".venv").exists() and not (project / ".venv.lock").exists()


@pytest.mark.parametrize("lacking", ["jiwer", "torch"])
def test_an_active_venv_that_lacks_something_is_left_alone(project, tmp_path, lacking):
    active = make_venv(
        tmp_path / "active", {name: version for name, version in MET.items() if name != lacking}
    )
    before = sorted((tmp_path / "active").rglob("*"))
    result = run(
        project,
        "t4",
        path=[active],
        PYTHONPATH=str(tmp_path / "pip"),
        VIRTUAL_ENV=str(tmp_path / "active"),
    )
    assert json.loads(result.stdout)["prefix"] == str(project / ".venv")
    assert (tmp_path / "pip.log").read_text().splitlines() == [str(project / ".venv")]
    assert "include-system-site-packages = false" in (project / ".venv/pyvenv.cfg").read_text()
    assert sorted((tmp_path / "active").rglob("*")) == before


def test_a_complete_venv_leaves_nothing_to_do(project, tmp_path):
    make_venv(project / ".venv", MET)
    result = run(project, "t4", path=[make_base(tmp_path / "base")])
    assert json.loads(result.stdout)["prefix"] == str(project / ".venv") and not result.stderr


@pytest.mark.parametrize(
    "packages, shared",
    [
        ({"torch": "2.9.1+cu126", "torchaudio": "2.9.1+cu126"}, True),
        ({"torch": "2.9.1", "torchaudio": "2.8.0"}, False),
        ({"torch": "2.7.1", "torchaudio": "2.7.1"}, False),
        ({"torch": "2.12.0", "torchaudio": "2.12.0"}, False),
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
    script(tmp_path / "debian/ensurepip.py", "raise ImportError")
    path = [make_base(tmp_path / "base", tmp_path / "pip", tmp_path / "debian")]
    result = run(project, "t4", path=path, PYTHONPATH=str(tmp_path / "debian"))
    assert json.loads(result.stdout)["prefix"] == str(project / ".venv"), result.stderr
    assert (tmp_path / "pip.log").read_text().splitlines() == [str(project / ".venv")]


def test_without_any_pip(project, tmp_path):
    script(tmp_path / "debian/ensurepip.py", "raise ImportError")
    path = [make_base(tmp_path / "base", tmp_path / "debian")]
    line = error_line(run(project, "t4", path=path, PYTHONPATH=str(tmp_path / "debian")), 1)
    assert "has no pip: sudo apt install python3-venv" in line


def test_without_a_venv_module(project, tmp_path):
    script(tmp_path / "debian/venv.py", "raise ImportError")
    line = error_line(
        run(project, "t4", path=[make_base(tmp_path / "base", tmp_path / "debian")]), 1
    )
    assert "sudo apt install python3-venv" in line


def test_without_a_python(project):
    assert "Python 3.10 to 3.14 is needed and none was found" in error_line(run(project, "t4"), 1)


def test_with_an_old_python_only(project, tmp_path):
    old = '#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.8.18" && exit\nexit 1\n'
    script(tmp_path / "old/python3", old)
    line = error_line(run(project, "t4", path=[tmp_path / "old"]), 1)
    assert "Python 3.10 to 3.14 is needed and" in line and "old/python3 is Python 3.8.18" in line
    assert not (project / ".venv").exists()
    # A newer one under another name is found.
    make_base(tmp_path / "new", tmp_path / "pip")
    (tmp_path / "new/python3").rename(tmp_path / "new/python3.10")
    result = run(
        project, "t4", path=[tmp_path / "old", tmp_path / "new"], PYTHONPATH=str(tmp_path / "pip")
    )
    assert json.loads(result.stdout)["prefix"] == str(project / ".venv"), result.stderr


def test_a_broken_venv_is_made_anew(project, tmp_path):
    path, extra = (
        [make_base(tmp_path / "base", tmp_path / "pip")],
        {"PYTHONPATH": str(tmp_path / "pip")},
    )
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/bin/python").symlink_to(
        "/nonexistent/python3"
    )  # the system's Python was upgraded
    (project / ".venv/left_over").touch()
    assert "--batch_size" in printed(run(project, "t4", path=path, **extra))
    assert not (project / ".venv/left_over").exists()


def test_an_unfinished_venv_is_made_anew(project, tmp_path):
    """Though the metadata of all packages are there, as when pip is killed while it copies the last
    one."""
    make_venv(project / ".venv", MET)
    (project / ".venv/left_over").touch()
    (project / ".venv.lock").write_text("unfinished\n")
    path = [make_base(tmp_path / "base", tmp_path / "pip")]
    assert "--batch_size" in printed(
        run(project, "t4", path=path, PYTHONPATH=str(tmp_path / "pip"))
    )
    assert not (project / ".venv/left_over").exists() and not (project / ".venv.lock").read_text()


def test_a_venv_with_an_old_python_is_not_deleted(project, tmp_path):
    (project / ".venv").mkdir()
    (project / ".venv/left_over").touch()
    script(
        project / ".venv/bin/python",
        '#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.1 && exit\ncase "$2" in *prefix*) exit 0;;'
        " esac\nexit 1\n",
    )
    assert ".venv has Python 3.9.1" in error_line(
        run(project, "t4", path=[make_base(tmp_path / "base")]), 1
    )
    assert (project / ".venv/left_over").exists()


@pytest.mark.parametrize(("how", "lock"), [("itself", ""), ("killed", "unfinished\n")])
def test_an_installation_that_failed_is_continued_unless_pip_was_killed(
    project, tmp_path, how, lock
):
    path = [make_base(tmp_path / "base", tmp_path / "pip")]
    line = error_line(
        run(project, "t4", path=path, PIP_FAILS=how, PYTHONPATH=str(tmp_path / "pip")), 1
    )
    assert (
        "pip could not install requirements.txt" in line
        and (project / ".venv.lock").read_text() == lock
    )


def test_a_venv_that_lacks_packages_gets_them_also_with_closed_streams(project, tmp_path):
    make_venv(project / ".venv", {"jiwer": MET["jiwer"]})
    (project / ".venv/left_over").touch()
    path = [make_base(tmp_path / "base", tmp_path / "pip")]
    command = ["sh", "-c", 'exec "$0" t4 <&- 2>&-', str(project / NAME)]
    result = run(project, command=command, path=path, PYTHONPATH=str(tmp_path / "pip"))
    assert json.loads(result.stdout)["streams"] == [True] * 3
    assert (project / ".venv/left_over").exists()


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
    line = error_line(run(project, "t4", path=[make_base(tmp_path / "base", tmp_path / "pip")]), 1)
    assert "cannot be written to" in line
    # An environment that has everything needs no writing.
    assert "--batch_size" in printed(run(project, "t4", path=[make_venv(tmp_path / "active", MET)]))


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


def start(project: Path, environ: dict[str, str], **extra) -> subprocess.Popen:
    def obey():  # nohup and & would let the tests, and so the script, ignore signals
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    extra |= {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "preexec_fn": obey,
    }
    return subprocess.Popen([str(project / NAME), "t4"], env=environ, cwd=project.parent, **extra)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_installation_and_the_venv_counts_as_unfinished(
    project, tmp_path, number
):
    extra = environment(
        project, make_base(tmp_path / "base", tmp_path / "pip"), PYTHONPATH=str(tmp_path / "pip")
    )
    process = start(
        project, {**extra, "PIP_WAITS_FOR": str(tmp_path / "never")}, start_new_session=True
    )
    wait_for(tmp_path / "pip.log", process)
    if number == signal.SIGKILL:
        os.killpg(process.pid, number)
    else:
        process.send_signal(
            number
        )  # to bash alone: pip, which holds the pipe's other end, must end as well
    output, errors = process.communicate(timeout=60)
    assert (
        process.returncode == (-number if number == signal.SIGKILL else 128 + number) and not output
    )
    assert [line.split()[0] for line in errors.splitlines()] == ["making", "installing"]
    assert (project / ".venv/pyvenv.cfg").exists() and (
        project / ".venv.lock"
    ).read_text() == "unfinished\n"


def test_a_signal_ends_the_making_of_the_venv(project, tmp_path):
    half = """
    import os, pathlib, sys, time
    folder = pathlib.Path(sys.argv[-1])
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text(f"home = {os.path.dirname(sys.executable)}")
    time.sleep(60)
    """
    script(tmp_path / "half/venv.py", textwrap.dedent(half))
    process = start(project, environment(project, make_base(tmp_path / "slow", tmp_path / "half")))
    wait_for(project / ".venv/pyvenv.cfg", process)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and errors.startswith("making ") and errors.count("\n") == 1
    assert (project / ".venv.lock").read_text() == "unfinished\n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_packages_are_looked_for(project, tmp_path, number):
    python = (
        f'#!/bin/sh\ntouch "{tmp_path}/asked"\nwhile ! [ -e "{tmp_path}/go" ]; do sleep 0.01;'
        " done\n"
    )
    process = start(project, environment(project, script(tmp_path / "slow/python3", python).parent))
    wait_for(tmp_path / "asked", process)
    process.send_signal(number)
    (tmp_path / "go").touch()
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 128 + number
    assert not (project / ".venv").exists()


# --- hostile surroundings -------------------------------------------------------------------------

MODULES = (
    "codecs encodings ensurepip importlib io linecache os pip pytest re readline ruff runpy site"
    " sitecustomize torch".split()
)
MODULES += "torchaudio traceback usercustomize venv".split()
PROGRAMS = "bash dirname env flock head nvidia-smi python python3 readlink rm sed sh".split()
RELATIVE = {
    "PYTHONHOME": ".",
    "PYTHONUSERBASE": ".",
    "PYTHONPYCACHEPREFIX": ".",
    "PYTHONINSPECT": "1",
    "LD_LIBRARY_PATH": ":",
    "PYTHONSTARTUP": "re.py",
    "BASH_ENV": "start.sh",
    "CDPATH": ".",
}


@pytest.fixture
def hostile(tmp_path):
    """A folder whose modules and programs leave a file in its folder `executed`."""
    folder = tmp_path / "downloads"
    (folder / "executed").mkdir(parents=True)
    for name in MODULES:
        code = (
            f"import posix; posix.close(posix.open('{folder}/executed/{name}.py', posix.O_CREAT))\n"
        )
        for path in (f"{name}.py", *(f"{name}/{part}.py" for part in ("__init__", "__main__"))):
            script(folder / path, code)
    script(folder / "lib/python{}.{}/site-packages/user.pth".format(*sys.version_info), code)
    for name in (*PROGRAMS, "start.sh"):
        script(folder / name, f'#!/bin/sh\n: >"{folder}/executed/{name}"\n')
    add_packages(folder, MET)
    return folder


@pytest.mark.parametrize("extra", [{}, RELATIVE], ids=["plain", "variables"])
@pytest.mark.parametrize("case", ["complete", "torchrun", "new", "tests"])
def test_no_code_of_the_current_folder_runs(project, tmp_path, hostile, case, extra):
    path = ["", ".", "bin"] if extra else []
    libraries = [tmp_path / "debian"]
    extra = {**extra, "FAKE_PIP": str(tmp_path / "pip/pip"), "PYTHONPATH": str(libraries[0])}
    if path:
        extra["PYTHONPATH"] = f":.::{libraries[0]}:lib:"
    script(tmp_path / "debian/ensurepip.py", FAKE_ENSUREPIP)
    command = None
    if case == "new":
        path.append(make_base(tmp_path / "base", *libraries))
        python = (path[-1] / "python3").rename(path[-1] / "python3.real")
    else:
        path.append(make_venv(tmp_path / "active", {**MET, "pytest": "8.0.0", "ruff": "0.9.0"}))
        (path[-1] / "python3").unlink()
        python = path[-1] / "python3.real"
        python.symlink_to(BASE)
        site = next((tmp_path / "active").glob("lib/*/*"))
        for name in ("torch/distributed/run.py", "pytest/__main__.py"):
            script(site / name, FAKE_TORCHRUN)
        script(site / "ruff/__main__.py", "")
    # Python 3.13 needs the variable. 3.10 ignores it, and so do the older ones here.
    unsafe = (
        f'[ "$PWD" != "{hostile}" ] || [ "$PYTHONSAFEPATH" = 1 ] || : >"{hostile}/executed/unsafe"'
    )
    ignored = "unset PYTHONSAFEPATH" if sys.version_info < (3, 13) else ":"
    script(path[-1] / "python3", f'#!/bin/sh\n{unsafe}\n{ignored}\nexec "{python}" "$@"\n')
    if case == "tests":
        shutil.copy(ROOT / "run_tests.sh", project)
        (project / "requirements-dev.txt").write_text("pytest>=8,<10\nruff>=0.9,<1\n")
        command = [str(project / "run_tests.sh")]
    elif case == "torchrun":
        extra["GPUS"] = "2"
    result = run(project, path=path, command=command, cwd=hostile, **extra)
    assert not list((hostile / "executed").iterdir()), result.stderr
    arguments = printed(result)
    assert not {str(hostile), "", "."} & set(json.loads(result.stdout)["path"])
    assert arguments[:2] == {
        "torchrun": ["--standalone", "--nproc_per_node"],
        "tests": ["-m", "not slow"],
    }.get(case, ["--mixed_precision", "--device"])


@pytest.mark.parametrize(
    "given, kept", [(".:/a b::lib:/c\n:", "/a b:/c\n"), ("x/y", ""), (":", ""), ("", "")]
)
def test_entries_in_the_current_folder_are_dropped(project, given, kept):
    names = [*(RELATIVE.keys() - {"PYTHONSTARTUP", "CDPATH"}), "PATH", "PYTHONPATH", "HOME"]
    for name in names:
        code = f'{name}=$1; . "$0/common/env.sh"; printf %s "${{{name}-unset}}"'
        result = run(project, command=["/bin/bash", "-euc", code, str(project), given])
        assert result.stdout == (
            kept or {"PATH": "/usr/local/bin:/usr/bin:/bin"}.get(name, "unset")
        ), name


@pytest.mark.parametrize(
    "name", ['it\'s "a" $(touch x) `b`', "-rf *", "line\nbreak\n", ".hidden;{a,b}&"]
)
def test_any_name_of_the_clones_folder_works(project, tmp_path, name):
    project = project.rename(tmp_path / name)
    assert run(project, "t4", "minimal", "--print").stdout.count("--d_model 128") == 1
    base, pip = make_base(tmp_path / "base", tmp_path / "pip"), str(tmp_path / "pip")
    result = run(project, "t4", path=[base], PYTHONPATH=pip)
    assert result.returncode == 0 and json.loads(result.stdout)["prefix"] == str(
        project / ".venv"
    ), result.stderr
    command = ["sh", "--", f"{name}/{NAME}"]
    assert "--d_model" in run(project, "--rows", command=command).stdout
    assert "TIER: auto" in run(project, "--help", command=command).stdout


@pytest.mark.parametrize("words", ["t4 --print", "--rows", "--help"])
def test_output_that_cannot_be_written_is_said_in_one_line(project, words):
    command = ["sh", "-c", "", str(project / NAME)]
    for redirection in (">&-", ">/dev/full"):
        command[2] = f'exec "$0" {words} {redirection}'
        result = run(project, command=command)
        assert result.returncode == 1 and not result.stdout
        assert result.stderr == "error: nothing was printed: standard output is closed or full\n"
    # Notes and errors on a stderr that cannot be written to are lost; output and status are not.
    for redirection in ("2>&-", "2>/dev/full"):
        command[2] = f'exec "$0" {words} {redirection}'
        assert run(project, command=command).stdout == run(project, *words.split()).stdout
        command[2] = f'exec "$0" --print {redirection}'
        assert run(project, command=command).stdout == run(project, "--print").stdout
        command[2] = f'exec "$0" nothing {redirection}'
        assert run(project, command=command).returncode == 2


# --- the allocator --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, ["expandable_segments:True"] * 2),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, ["a:1"] * 2),
        ({"PYTORCH_ALLOC_CONF": "b:1"}, ["b:1"] * 2),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"}, ["a:1", "b:1"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, ["", ""]),
        ({"PYTORCH_ALLOC_CONF": ""}, ["", ""]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": ""}, ["a:1", ""]),
    ],
)
def test_allocator_variables(project, given, expected):
    command = [
        "bash",
        "-euc",
        '. "$0/common/env.sh"; printf "%s\\n" "$PYTORCH_CUDA_ALLOC_CONF" "$PYTORCH_ALLOC_CONF"',
        str(project),
    ]
    assert run(project, command=command, **given).stdout == "".join(
        f"{line}\n" for line in expected
    )


def test_the_user_s_environment_reaches_the_recipe(project, tmp_path):
    result = run(
        project, "t4", path=[make_venv(tmp_path / "active", MET)], PYTORCH_ALLOC_CONF="b:1"
    )
    assert json.loads(result.stdout)["environment"] == ["b:1", "b:1"]


# --- the files themselves -------------------------------------------------------------------------


def test_scripts_parse_and_can_be_run():
    for path in [*ROOT.glob("run_*.sh"), ROOT / ".ci/run"]:
        assert os.access(path, os.X_OK), path
        subprocess.run(["bash", "-n", path], check=True)
