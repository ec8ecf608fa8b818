"""The walls of the house, read from the syntax trees: who may import whom, and who may ask what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import weight

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("common", "speech", "models", "dry_run", "recipes", "webui", "benchmarks", "tests")
SPEECH_MAY_USE = (
    "errors",
    "files",
    "device",
    "layers",
    "memory",
    "options",
    "batches",
    "records",
    "checkpoint",
    "layers",
    "parts",
)


def modules(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(node: ast.AST) -> set[str]:
    """The dotted names that a module or function imports, at its top or inside."""
    names = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            names |= {alias.name for alias in each.names}
        elif isinstance(each, ast.ImportFrom) and each.module:
            names |= {f"{each.module}.{alias.name}" for alias in each.names}
    return names


def imported_folders(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(tree_of(path))} & set(FOLDERS)


@pytest.mark.parametrize(
    "folder, allowed",
    [
        ("common", {"common"}),
        ("speech", {"common", "speech"}),
        ("models", {"common", "speech", "models"}),
        ("dry_run", {"dry_run"}),
        ("recipes", {"common", "speech", "models"}),
        ("webui", set(FOLDERS) - {"benchmarks", "tests"}),
        ("benchmarks", set(FOLDERS) - {"webui", "tests"}),
    ],
)
def test_what_a_folder_imports(folder, allowed):
    for path in modules(folder):
        plans = label(path) == "common/parts/planned.py"
        assert imported_folders(path) <= allowed | ({"dry_run"} if plans else set()), label(path)


def test_the_core_imports_no_part():
    """But in the function that reads the flag of a part."""
    for path in modules("common"):
        if path.parent.name == "parts":
            continue
        for node in tree_of(path).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert not any(name.startswith("common.parts") for name in imported(node)), path


def test_no_circle():
    """Of modules that name each other, inside of functions, too."""
    assert weight.circles(weight.imports(ROOT)) == []


def test_the_smallest_recipe_loads_little():
    lines, _, _ = weight.loads(ROOT, "template")
    assert lines <= 10_500


def test_a_run_of_the_template_loads_no_part(tmp_path):
    """Training, resuming, evaluating and transcribing: a part comes in with its flag."""
    program = """
import sys
from pathlib import Path
from common import options
from recipes import template

def run(*flags):
    parser = options.Parser(template.__doc__)
    template.add_arguments(parser)
    template.main(parser.parse_args(["--output_dir", sys.argv[1], "--device", "cpu", *flags]))

short = ["--dataloader_num_workers", "0", "--save_every", "1"]
run("--max_steps", "1", *short)
run("--max_steps", "2", "--resume", "auto", *short)
run("--evaluate", *short[:2])
audio = next(Path(sys.argv[1]).rglob("*.wav"))
run("--transcribe", str(audio), "--resume", sys.argv[1] + "/checkpoints/best.safetensors")
rooms = ("common.parts.", "models.", "dry_run", "webui")
sys.exit(" ".join(name for name in sys.modules if name.startswith(rooms)) or 0)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-500:]


def test_the_planner_needs_only_torch():
    for path in modules("dry_run"):
        roots = {name.split(".")[0] for name in imported(tree_of(path))}
        assert roots <= {"torch", "dry_run", *sys.stdlib_module_names}, label(path)


def test_no_family_imports_another():
    families = {path.name for path in (ROOT / "models").iterdir() if path.is_dir()}
    for family in families - {"__pycache__"}:
        for path in modules(f"models/{family}"):
            used = {name.split(".")[1] for name in imported(tree_of(path)) if name[:7] == "models."}
            assert not used & (families - {family}), label(path)


def test_speech_and_models_know_no_loop():
    for path in modules("speech", "models"):
        used = {name.split(".")[1] for name in imported(tree_of(path)) if name[:7] == "common."}
        assert used <= set(SPEECH_MAY_USE), label(path)


def test_manifests_and_headers_are_read_without_torch():
    """What a script asks before it starts a run must answer at once."""
    command = (
        "import sys, speech.data.manifest, speech.data.headers; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT).returncode == 0


def test_nobody_asks_whether_a_run_is_only_planned():
    """Except functions named `resolve`, which fill the records by which others know it."""
    for path in modules("recipes", "speech", "models"):
        tree = tree_of(path)
        tree.body = [node for node in tree.body if getattr(node, "name", "") != "resolve"]
        asked = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not asked & {"options.plans", "run.is_planned"}, label(path)
