"""The weight of this project: lines and tokens by folder, what each recipe loads and how many flags
it has, import circles, and tests.

    python benchmarks/weight.py            # of this checkout
    python benchmarks/weight.py ../before  # of another one, by the same count
"""

import ast
import json
import subprocess
import sys
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()

FOLDERS = (
    "recipes",
    "common",
    "common/parts",
    "speech",
    "models",
    "dry_run",
    "webui",
    "benchmarks",
)
WRITTEN = (".py", ".sh", ".js", ".css", ".html")
SILENT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT}
# Run in the checkout: the project's files that `--help all` has loaded, and the number of flags.
LOADS = """
import importlib, json, sys
from pathlib import Path
sys.path.insert(0, ".")
recipe = importlib.import_module("recipes." + sys.argv[1])
from common import options
parser = options.Parser(recipe.__doc__)
recipe.add_arguments(parser)
root = Path.cwd()
paths = {Path(m.__file__) for m in sys.modules.values() if getattr(m, "__file__", None)}
names = sorted(str(p.relative_to(root)) for p in paths if p.is_relative_to(root))
own = [name for name in names if not name.startswith(".")]
print(json.dumps([own, len(parser._actions) - 1, len(parser.in_short_help)]))
"""


def files(root: Path, folder: str) -> list[Path]:
    """The written files of a folder; of common without its parts."""
    written = [path for path in sorted((root / folder).rglob("*")) if path.suffix in WRITTEN]
    if folder == "common":
        return [path for path in written if "parts" not in path.parts]
    return written


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def tokens(paths: list[Path]) -> int:
    """Python's tokens without line ends, indentation and comments."""
    count = 0
    for path in paths:
        if path.suffix == ".py":
            with path.open("rb") as source:
                count += sum(
                    token.type not in SILENT for token in tokenize.tokenize(source.readline)
                )
    return count


def functions(paths: list[Path]) -> int:
    """The test functions."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths if path.suffix == ".py"]
    names = [node.name for tree in trees for node in ast.walk(tree) if hasattr(node, "name")]
    return sum(str(name).startswith("test_") for name in names)


def loads(root: Path, recipe: str) -> tuple[int, int, int]:
    """Lines that a recipe loads, its flags, and those in its short help."""
    command = [sys.executable, "-c", LOADS, recipe]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    names, flags, usual = json.loads(answer.stdout)
    return lines([root / name for name in names]), flags, usual


def imports(root: Path) -> dict[str, set[str]]:
    """The project's modules that each module names, inside of functions, too."""
    paths = [path for folder in FOLDERS for path in files(root, folder) if path.suffix == ".py"]
    dotted = {".".join(path.relative_to(root).with_suffix("").parts): path for path in paths}
    graph = {}
    for name, path in dotted.items():
        named = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = {other for other in named if other in dotted and other != name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other."""
    reached = {}
    for name in graph:
        seen = set()
        todo = [name]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        reached[name] = seen
    groups = {
        tuple(sorted(other for other in graph if name in reached[other] and other in reached[name]))
        for name in graph
    }
    return [list(group) for group in sorted(groups) if group]


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    print("| folder | files | lines | tokens |\n| --- | --- | --- | --- |")
    groups = {folder: files(root, folder) for folder in FOLDERS}
    groups["preset scripts"] = sorted(root.glob("*.sh"))
    source = [path for paths in groups.values() for path in paths]
    starts = sorted(root.glob("models/*/start.py"))
    tests = files(root, "tests")
    for name, paths in {
        **groups,
        "**source**": source,
        "**tests**": tests,
        "the five `start.py`": starts,
    }.items():
        print(f"| {name} | {len(paths)} | {lines(paths):,} | {tokens(paths):,} |")
    print(f"\ntest functions: {functions(tests):,}")
    print("\n| recipe | lines | loads | flags | in `--help` |\n| --- | --- | --- | --- | --- |")
    for path in sorted((root / "recipes").glob("*.py")):
        loaded, flags, usual = loads(root, path.stem)
        print(f"| {path.stem} | {lines([path]):,} | {loaded:,} | {flags} | {usual} |")
    groups_in_circles = circles(imports(root))
    print(f"\nimport circles: {len(groups_in_circles)}")
    for group in groups_in_circles:
        print(f"- {', '.join(group)}")


if __name__ == "__main__":
    main()
