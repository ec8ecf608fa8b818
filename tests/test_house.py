"""The walls of the house, read from the syntax trees: who may import whom."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("common", "speech", "recipes", "benchmarks", "tests", "dry_run")
SPEECH_MAY_USE = {
    "errors",
    "files",
    "device",
    "memory",
    "options",
    "batches",
    "checkpoint",
    "records",
}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The dotted names of the project's modules that a file imports, at its top or inside a
    function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in OURS}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules("common"), ids=label)
def test_common_knows_no_speech(path):
    for name in imported(path):
        is_plan = (
            path.name == "loop.py" and name == "dry_run"
        )  # only --dry_run and --verify_gpu load it
        assert name.split(".")[0] == "common" or is_plan, f"{label(path)} imports {name}"


def test_only_a_planned_run_loads_the_planner():
    tree = ast.parse((ROOT / "common" / "loop.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = [
        f.name
        for f in functions
        for node in ast.walk(f)
        if isinstance(node, ast.Import) and node.names[0].name == "dry_run"
    ]
    assert names == ["planner"]


@pytest.mark.parametrize("path", modules("dry_run"), ids=label)
def test_the_planner_imports_only_torch(path):
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").split(".")[0])
    assert roots <= {"torch", "dry_run", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", modules("speech"), ids=label)
def test_speech_knows_no_loop(path):
    for name in imported(path):
        package, module = name.split(".")[:2]
        assert package in ("common", "speech"), f"{label(path)} imports {name}"
        assert package == "speech" or module in SPEECH_MAY_USE, f"{label(path)} imports {name}"


@pytest.mark.parametrize("path", modules("recipes"), ids=label)
def test_a_recipe_imports_no_other_recipe(path):
    for name in imported(path):
        assert name.split(".")[0] in ("common", "speech"), f"{label(path)} imports {name}"


@pytest.mark.parametrize("path", modules("benchmarks"), ids=label)
def test_a_benchmark_imports_no_test(path):
    for name in imported(path):
        assert name.split(".")[0] != "tests", f"{label(path)} imports {name}"
