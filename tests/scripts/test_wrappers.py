"""The preset scripts as a user runs them. The Python environment is tested in a copy of the project
with a stub for the recipe, made-up requirements and interpreters with made-up packages: no network.
tests/scripts/test_preset.py asks common/preset.py what a script would start."""

import functools
import http.server
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

from common import preset
from tests.presets import ROOT, answer, declared, flags_of, value

KONKANI = "run_training_memory_optimized.sh"
PARAKEET = "run_parakeet_tdt.sh"
WEBUI = "run_webui.sh"
SCRIPTS = sorted(
    path.name for path in ROOT.glob("run_*.sh") if path.name not in ("run_tests.sh", WEBUI)
)


def error_line(result: subprocess.CompletedProcess, status: int) -> str:
    """The one line that starts with "error: ", which is the last of stderr."""
    assert result.returncode == status, (result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert result.stderr.rstrip().endswith(lines[0])
    return lines[0]


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_rows_name_every_tier_and_size(script):
    ways = [[str(ROOT / script)]]
    if script == KONKANI:
        ways += [["sh", script], ["bash", script, "cpu"]]
    for command in ways:
        result = subprocess.run(
            [*command, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert result.returncode == 0 and not result.stderr
        assert f"./{script} [TIER] [SIZE]" in result.stdout
        assert f"GPUS=2 ./{script}" in result.stdout
        assert "BASH_VERSION" not in result.stdout
    words = set(re.findall(r"\w[\w.]*\b", result.stdout.partition("TIER: ")[2]))
    table = subprocess.run([ROOT / script, "--rows"], capture_output=True, text=True, timeout=60)
    assert table.stdout == f"{declared(script).rows}\n"
    rows = preset.read_rows(table.stdout)
    assert {*preset.names(rows, 0), *preset.names(rows, 1)} <= words


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_prints_what_preset_answers(script):
    for words in ("8gb", "tiny", "cpu --evaluate"):
        result = subprocess.run(
            [ROOT / script, *words.split(), "--print"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "GPUS": "2"},
        )
        expected = answer(script, *words.split(), GPUS="2")
        assert (result.returncode, result.stderr) == (expected.status, expected.said)
        assert shlex.split(result.stdout) == expected.command


PROGRAMS = [
    path.relative_to(ROOT)
    for folder in ("recipes", "benchmarks", "speech", "models", "webui")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "\nif __name__ ==" in path.read_text(encoding="utf-8")
    # It is started by a program that has the packages.
    and path.stem != "launch"
]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_python_without_the_packages_is_told_which_one_to_activate(program):
    words = [str(program)]
    if program.parts[0] in ("speech", "models") or program.name == "use.py":
        words = ["-m", ".".join(program.with_suffix("").parts).removesuffix(".__main__")]
    result = subprocess.run([BASE, "-S", *words], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {BASE}") and result.stderr.count("\n") == 1
    assert " has no package torch: first type: " in result.stderr
    assert f"source {ROOT}/.venv/bin/activate" in result.stderr


# --- a copy of the project ------------------------------------------------------------------------

BASE = getattr(sys, "_base_executable", sys.executable)
TOOLS = "bash cat chmod dirname env flock grep rm sed sh sleep touch".split()
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
    for name in (KONKANI, "common/env.sh", "common/preset.py"):
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


def installing(project: Path) -> dict:
    """What `run` needs so that an interpreter without packages can install them."""
    folder = project.parent
    path = make_base(folder / "base", folder / "pip")
    return {"path": [path], "PYTHONPATH": str(folder / "pip")}


def report_of(result: subprocess.CompletedProcess) -> dict:
    """What the stub for the recipe printed."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_print_can_be_pasted_works_from_anywhere_and_installs_nothing(project, tmp_path):
    words = ["--print", "--train_manifest", "my data/गोंय.json", "--learning_rate", "1e-4"]
    path = [make_base(tmp_path / "base")]
    result = run(project, "t4", "minimal", *words, path=path)
    assert result.returncode == 0 and not (project / ".venv").exists(), result.stderr
    pasted = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {result.stdout.strip()}"], capture_output=True, text=True
    )
    pasted = pasted.stdout.split("\0")[:-1]
    assert pasted[:2] == ["python", str(project / "recipes/konkani_conformer.py")]
    assert pasted[2:] == [*answer(KONKANI, "t4", "minimal").command[2:], *words[1:]]
    for command, cwd in (
        (["sh", KONKANI], project),
        (["bash", f"{project.name}/{KONKANI}"], tmp_path),
        ([f"./{KONKANI}"], project),
    ):
        other = run(project, "t4", "minimal", *words, command=command, cwd=cwd, path=path)
        assert other.stdout == result.stdout


def test_the_hours_of_speech_need_the_packages_first(project, tmp_path):
    """Which are installed once, or not at all by --print."""
    shutil.copy(ROOT / PARAKEET, project / PARAKEET)
    shutil.copy(project / "recipes/konkani_conformer.py", project / "recipes/parakeet_tdt.py")
    executable(project / "speech/data/hours.py", "print('medium_data 3')")
    (tmp_path / "train.json").touch()
    words = ["8gb", "--train_manifest", str(tmp_path / "train.json")]
    extra = {**installing(project), "command": [str(project / PARAKEET)]}
    result = run(project, *words, "--print", **extra)
    assert "before the packages are installed" in result.stderr
    assert value(shlex.split(result.stdout), "--batch_size") == "8"
    assert not (project / ".venv").exists()
    result = run(project, *words, **extra)
    assert result.stderr.endswith("data: medium_data (auto: 3 h of speech)\n")
    assert value(report_of(result)["arguments"], "--batch_size") == "8"
    assert value(report_of(result)["arguments"], "--gradient_accumulation_steps") == "6"
    assert len((tmp_path / "pip.log").read_text().splitlines()) == 1


# --- the environment ------------------------------------------------------------------------------


WITHOUT_TORCH = {"jiwer": MET["jiwer"]}
WITHOUT_JIWER = {"torch": MET["torch"]}


@pytest.mark.parametrize(
    ("active", "base", "venv", "prefix", "installs", "shares"),
    [
        (MET, {}, None, "active", False, None),
        (WITHOUT_JIWER, {}, None, ".venv", True, False),  # the active one is left alone
        (WITHOUT_TORCH, {}, None, ".venv", True, False),
        (None, {}, MET, ".venv", False, False),  # nothing is left to do
        (None, {}, WITHOUT_TORCH, ".venv", True, False),
        # Colab and conda: their torch is used if it can be, their installation is not touched.
        (None, {"torch": "2.8.0+cu126"}, None, ".venv", True, True),
        (None, {"torch": "2.7.1"}, None, ".venv", True, False),
        (None, {"torch": "2.15.0+cu132"}, None, ".venv", True, True),
        (None, {"torch": "2.16.0"}, None, ".venv", True, False),
        (None, {}, None, ".venv", True, False),
    ],
)
def test_which_python_runs_and_what_is_installed(
    project, tmp_path, active, base, venv, prefix, installs, shares
):
    add_packages(tmp_path / "base_packages", base)
    folder = make_base(tmp_path / "base", tmp_path / "base_packages", tmp_path / "pip")
    if active:
        folder = make_venv(tmp_path / "active", active)
    if venv:
        make_venv(project / ".venv", venv)
        (project / ".venv/left_over").touch()
    before = sorted((tmp_path / "active").rglob("*"))
    result = run(project, "t4", path=[folder], PYTHONPATH=str(tmp_path / "pip"))
    where = tmp_path / "active" if prefix == "active" else project / ".venv"
    assert report_of(result)["prefix"] == str(where) and (installs or not result.stderr)
    assert sorted((tmp_path / "active").rglob("*")) == before
    log = tmp_path / "pip.log"
    assert (log.read_text() if log.exists() else "") == (f"{where}\n" if installs else "")
    assert (project / ".venv/left_over").exists() == bool(venv)
    configuration = project / ".venv/pyvenv.cfg"
    assert configuration.exists() == (prefix == ".venv")
    if prefix == ".venv":
        shared = f"include-system-site-packages = {str(shares).lower()}"
        assert shared in configuration.read_text()


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
    result = run(project, "t4", **installing(project))
    assert report_of(result)["prefix"] == str(project / ".venv")
    assert not (project / ".venv/left_over").exists() and not (project / ".venv.lock").read_text()


def test_an_installation_that_failed_is_repeated(project, tmp_path):
    extra = installing(project)
    line = error_line(run(project, "t4", PIP_FAILS="yes", **extra), 1)
    assert "pip could not install requirements.txt" in line
    assert report_of(run(project, "t4", **extra))["prefix"] == str(project / ".venv")


@pytest.mark.parametrize("state", ["reached", "refused", "driver"])
def test_without_an_nvidia_driver_torch_is_the_cpu_build(project, tmp_path, state):
    if Path("/proc/driver/nvidia").exists() or Path("/dev/nvidia0").exists():
        pytest.skip("this machine has an NVIDIA driver")
    if state == "driver":
        executable(tmp_path / "tools/nvidia-smi", "#!/bin/sh\nexit 1\n")
    (tmp_path / "index/torch").mkdir(parents=True)
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "index")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}"
        asked = f"{index}/gone" if state == "refused" else index
        result = run(project, "t4", TORCH_INDEX=asked, **installing(project))
        server.shutdown()
    venv = str(project / ".venv")
    assert report_of(result)["prefix"] == venv
    log = (tmp_path / "pip.log").read_text().splitlines()
    assert log == ([f"{venv} from {index}", venv] if state == "reached" else [venv])
    assert ("cannot be used: torch comes from pip's own index" in result.stderr) == (
        state == "refused"
    )


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
    time.sleep(0.5)  # pip is two processes here, and the second has just begun
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number) and not output
    assert "error: " not in errors
    assert (project / ".venv.lock").read_text() == "unfinished\n"
    (tmp_path / "go").touch()
    report_of(run(project, "t4", path=[path], PYTHONPATH=str(tmp_path / "pip")))
    assert len((tmp_path / "pip.log").read_text().splitlines()) == 2


def test_gpus_starts_torchs_launcher(project, tmp_path):
    """With the launcher's flags, the recipe and its flags. tests/recipes/test_machines.py runs
    the real launcher."""
    active = make_venv(tmp_path / "active", MET)
    site = next((tmp_path / "active").glob("lib/*/*"))
    executable(site / "torch/distributed/run.py", FAKE_TORCHRUN)
    words = ["t4", "--learning_rate", "1e-4"]
    result = run(project, *words, path=[active], GPUS="2")
    recipe = str(project / "recipes/konkani_conformer.py")
    report = report_of(result)
    launcher = ["--standalone", "--nproc_per_node", "2", recipe]
    assert report["arguments"] == [*launcher, *flags_of(KONKANI, *words, GPUS="2")]
    assert report["environment"] == ["1"] and not result.stderr


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

    extra = {**installing(project), "command": command}
    report = report_of(run(project, "--port", "1", "--data", "a b", **extra))
    assert report["prefix"] == str(project / ".venv")
    assert report["arguments"] == ["--port", "1", "--data", "a b"]
    (site,) = (project / ".venv").glob("lib/*/site-packages")
    assert {"gradio-6.16.dist-info", "jiwer-4.dist-info"} <= {path.name for path in site.iterdir()}
    assert not run(project, **extra).stderr  # nothing is left to do
