"""What the documentation says is true of the code: commands, flags, paths, links, messages,
examples."""

import argparse
import ast
import importlib
import json
import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import run

from common import options
from models import extend
from models.wav2vec2.settings import PUBLISHED, TOKENIZERS
from webui import app

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
# Those of the README: a user's copies have neither a page nor a preset.
LINKED = set(re.findall(r"\(recipes/(\w+)\.md\)", README.read_text(encoding="utf-8")))
RECIPES = sorted(name for name in LINKED if (ROOT / f"recipes/{name}.py").exists())
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    ROOT / "webui/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").glob("*.md")),
]
# Further pages of a recipe.
RECIPE_OF = {"parakeet_live": "parakeet_tdt", "parakeet_export": "parakeet_tdt"}
EXTEND = "python -m models.extend "
FOLDERS = ("recipes", "common", "speech", "models", "dry_run", "webui", "benchmarks", "tests")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Paths that a reader creates, and a script of another project.
EXAMPLES = {"recipes/my_model.py", "models/morse", "run_training.sh"}
# Messages of other programs in the README's table.
FOREIGN = {
    "Process 75955 has 14.17 GiB memory in use",
}
SPELLINGS = {"--x", "--no_x", "--print"}  # how on/off flags look; the preset scripts' own flag
TORCHRUN = set(run.get_args_parser()._option_string_actions)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(
    r"((?:[A-Z]+=\S+ )*)(\./run_(?:training|whisper|parakeet|wav2vec2|matcha|xtts).*)"
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in one language."""
    return [body for kind, body in FENCE.findall(read(path)) if kind == language]


def code(path: Path) -> list[str]:
    """All code of a page: the lines of its blocks, without comments and with continued lines
    joined, and its spans. A command "at" an earlier commit runs there."""
    page = re.sub(r"`[^`]+`\s+at\s+[0-9a-f]{7}\b", "", read(path))
    lines = [
        line for _, body in FENCE.findall(page) for line in body.replace("\\\n", " ").splitlines()
    ]
    lines = [re.split(r"\s#\s", line)[0].strip().removeprefix("!") for line in lines]
    return [line for line in lines if line] + re.findall(r"`([^`]+)`", FENCE.sub("", page))


def commands(path: Path) -> list[str]:
    """The commands of a page that train or use a model, if their arguments are written out."""
    return [
        line
        for line in code(path)
        if (SCRIPT.match(line) or line.startswith(("python recipes/", EXTEND)))
        and not re.search(r"\.\.\.|\[|--help", line)
    ]


def parser_of(recipe: str) -> options.Parser:
    parser = options.Parser("")
    importlib.import_module(f"recipes.{recipe}").add_arguments(parser)
    return parser


def flags_of(recipe: str) -> set[str]:
    return set(parser_of(recipe)._option_string_actions)


def flags_of_the_page() -> set[str]:
    """Those of ./run_webui.sh."""
    parser = options.Parser("")
    app.add_arguments(parser)
    return set(parser._option_string_actions)


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def source_texts() -> list[str]:
    """The texts in the code that messages are made of; ... stands for what is filled in."""
    texts = []
    for folder in ("common", "speech", "models", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(read(path))):
                if isinstance(node, ast.JoinedStr):
                    texts.append(
                        "".join(
                            part.value if isinstance(part, ast.Constant) else "..."
                            for part in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return texts


# --- form -----------------------------------------------------------------------------------------


def test_the_readme_is_short():
    assert len(read(README).splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_wrapped(page):
    prose = FENCE.sub("", read(page)).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.startswith("|")] == []


# --- flags and commands ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_exist(page):
    """In the recipe that a command names, else in that of a recipe's page, elsewhere in any recipe;
    flags of other programs in those programs' commands."""
    recipe = RECIPE_OF.get(page.stem, page.stem)
    recipes = [recipe] if recipe in RECIPES else RECIPES
    known = set.union(*map(flags_of, recipes)) | SPELLINGS
    if "parakeet_tdt" in recipes:
        known |= set(extend.make_parser()._option_string_actions)
    if recipe not in RECIPES:
        known |= flags_of_the_page()
    outside = re.sub(r"`[^`]+`|<!--.*?-->", "", FENCE.sub("", read(page)))
    assert FLAG.findall(outside) == [], "a flag is written without backticks"
    others = {line: script for line in code(page) if (script := script_of(line))}
    known |= {flag for script in others.values() for flag in FLAG.findall(script)}
    for line in code(page):
        if line.startswith(("hf download ", "pip ", "#SBATCH ", "srun ", "ct2-")):
            continue
        named = re.match(r"python recipes/(\w+)\.py ", line)
        flags = flags_of(named[1]) if named and named[1] in RECIPES else known
        flags |= SPELLINGS
        if line.startswith("torchrun ") or page.stem == "several_gpus":
            flags |= TORCHRUN
        if line in others:
            flags = set(FLAG.findall(others[line]))
        assert [flag for flag in FLAG.findall(line) if flag not in flags] == [], line


def script_of(line: str) -> str | None:
    """The source of a command that is no recipe."""
    named = re.match(r"python (?:-m ([\w.]+)|(benchmarks/\w+\.py))\s", f"{line} ")
    if not named or line.startswith(EXTEND):
        return None
    path = ROOT / (named[2] or named[1].replace(".", "/") + ".py")
    return read(path) if path.is_file() else None


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_flag_is_described(recipe):
    """On the recipe's pages, or among those that the recipes share. A switch may be named by the
    flag that turns it off."""
    names = [recipe, *(page for page, of in RECIPE_OF.items() if of == recipe)]
    pages = [ROOT / "docs/flags.md", *(ROOT / f"recipes/{name}.md" for name in names)]
    described = {flag for page in pages for line in code(page) for flag in FLAG.findall(line)}
    missing = [
        action.option_strings[0]
        for action in parser_of(recipe)._actions
        if action.dest != "help" and described.isdisjoint(action.option_strings)
    ]
    assert missing == []


def accept(line: str, folder: Path) -> None:
    """Parses a command; a preset script prints the recipe's command in `folder`, which is then
    parsed."""
    if line.startswith(EXTEND):
        if words := shlex.split(line)[4:]:  # else it only names the command
            extend.make_parser().parse_args(["parakeet", *words])
        return
    words = shlex.split(line)
    if found := SCRIPT.match(line):
        variables = dict(word.split("=", 1) for word in found[1].split())
        environment = {**os.environ, "GPUS": "", **variables}
        words = shlex.split(found[2])
        printing = [str(ROOT / words[0]), *words[1:], "--print"]
        script = subprocess.run(
            printing, capture_output=True, text=True, cwd=folder, env=environment, timeout=60
        )
        assert script.returncode == 0, f"{line}: {script.stderr}"
        words = shlex.split(script.stdout)
    number = next(i for i, word in enumerate(words) if word.endswith(".py"))
    recipe = Path(words[number]).stem
    if recipe == "my_model":
        recipe = "template"
    args = parser_of(recipe).parse_args(words[number + 1 :])
    assert isinstance(args, argparse.Namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_accepted(page, tmp_path):
    for line in commands(page):
        accept(line, tmp_path)


# --- paths and links ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_exist(page):
    pattern = rf"(?<![\w/-])(?:(?:{'|'.join(FOLDERS)})/[\w./*-]*|run_[\w*]+\.sh|requirements[\w-]*\.txt|[A-Z]+\.md)"
    for line in code(page):
        for name in re.findall(pattern, line.replace("./", "")):
            base = page.parent if page.parent != ROOT and "/" not in name else ROOT
            assert name in EXAMPLES or any([*base.glob(name), *ROOT.glob(name)]), (
                f"{name} in {line!r}"
            )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", read(page))):
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", FENCE.sub("", read(linked)), re.MULTILINE)
            assert anchor in map(slug, headings), target


def first_cells(page: str, header: str) -> set[str]:
    """The names in the first column of the table under a header."""
    rows = page.split(header)[1].split("\n\n")[0].splitlines()
    return {name for row in rows if row for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_map_is_complete():
    page = read(ROOT / "CONTRIBUTING.md")
    with_code = {path.parent for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    folders = {f"{name_of(path)}/" for path in with_code - {ROOT / "speech"}}
    folders = {folder for folder in folders if not folder.startswith("tests/")}
    assert folders | {"notebooks/", "tests/"} == first_cells(
        page, "| folder | content | may import |"
    )
    core = [path.name for path in (ROOT / "common").iterdir() if path.suffix in (".py", ".sh")]
    assert {*core} - {"__init__.py"} == first_cells(page, "| `common/` | the core |")


def test_every_benchmark_is_described():
    listed = set(re.findall(r"`(\w+\.py)`", read(ROOT / "benchmarks/README.md")))
    assert listed == {path.name for path in (ROOT / "benchmarks").rglob("*.py")}


# --- messages -------------------------------------------------------------------------------------


def test_the_messages_in_the_table_of_errors_exist():
    rows = read(README).split("## Errors")[1].split("\n## ")[0]
    first_cells = [row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")]
    messages = [message for cell in first_cells for message in re.findall(r"`([^`]+)`", cell)]
    texts = source_texts()
    assert len(messages) >= 6 and set(messages) >= FOREIGN
    for message in set(messages) - FOREIGN:
        pattern = re.compile(".*".join(map(re.escape, message.split("..."))))
        assert any(map(pattern.search, texts)), message


# --- notebooks ------------------------------------------------------------------------------------


def run_notebook(path: Path, shell: Callable[[str], list[str]], settings: dict[str, str]) -> None:
    """Runs the code cells one after the other, as IPython does. `shell` is called with each line
    after "!" or "%", in which $NAME is the value of a variable, and returns what it prints; False
    if it fails. `settings`: values in place of those that the notebook has."""
    values: dict = {}

    def answer(line: str) -> list[str] | bool:
        printed = shell(string.Template(line).safe_substitute(values))
        values["_exit_code"] = int(printed is False)
        return printed

    values["shell"] = answer
    settings = {"REPOSITORY": "https://example.org/a/b", **settings}
    for cell in json.loads(read(path))["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        for name, value in settings.items():
            source = re.sub(rf'^{name} = "[^"]*"', f'{name} = "{value}"', source, flags=re.M)
        source = re.sub(
            r"^( *)(\w+ = )?[!%](.*)$",
            lambda m: f"{m[1]}{m[2] or ''}shell({m[3]!r})",
            source,
            flags=re.M,
        )
        exec(source, values)


@pytest.fixture
def colab(monkeypatch):
    """Colab's package, with a drive that mounts nothing."""
    module = SimpleNamespace(drive=SimpleNamespace(mount=lambda path: None))
    monkeypatch.setitem(sys.modules, "google.colab", module)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebooks_are_well_formed_and_without_outputs(notebook):
    content = json.loads(read(notebook))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    cells = content["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells) > 5
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    pages = re.findall(r"docs/\w+\.md", read(notebook))
    assert pages and all((ROOT / page).is_file() for page in pages)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_the_commands_of_notebooks_are_accepted(notebook, colab, tmp_path):
    """With a table and without one."""
    lines: list[str] = []

    def shell(line: str) -> list[str]:
        lines.append(line)
        return ["installing", "python"]

    mine = {"TABLE": "my tapes/*.eaf", "RECORDING": "a b.wav", "TEST": "c d.json", "RUN": "my run"}
    run_notebook(notebook, shell, mine)
    assert sum("--train_manifest 'my tapes/*.eaf'" in line for line in lines) == 2
    weights = [line.removeprefix(f"curl -fLO {PUBLISHED}") for line in lines if "curl" in line]
    assert weights == ["omniASR-CTC-300M.pt", *TOKENIZERS.values()][:2]
    run_notebook(notebook, shell, {})
    used = [line for line in lines if SCRIPT.match(line) or line.startswith("python recipes/")]
    assert len(used) == 5 + 2
    for line in used:
        accept(line, tmp_path)
    others = ("curl ", "git ", "[ -d ", "cd ", "bash common/env.sh ", "python -m pip ")
    assert all(line in used or line.startswith(others) for line in lines)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_a_notebook_stops_where_a_command_fails(notebook, colab):
    lines: list[str] = []

    def shell(line: str) -> list[str] | bool:
        lines.append(line)
        return failing not in line and ["python"]

    for failing in ("git", "ensure", "300M.pt", "tokenizer", "--check", "run_", "pip", "--export"):
        with pytest.raises(SystemExit, match="The reason is above"):
            run_notebook(notebook, shell, {"TABLE": "a.csv"})
        assert failing in lines[-1]
    for failing, setting in (("--transcribe", "RECORDING"), ("--evaluate", "TEST")):
        with pytest.raises(SystemExit, match="The reason is above"):
            run_notebook(notebook, shell, {setting: "a.wav"})
        assert failing in lines[-1]
    lines.clear()
    with pytest.raises(SystemExit, match="Put the address of this project into REPOSITORY"):
        run_notebook(notebook, shell, {"REPOSITORY": "https://github.com/OWNER/NAME"})
    assert not lines


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_a_notebook_trains_resumes_and_exports(notebook, colab, tmp_path):
    """On the demo corpus, with a few updates. What is installed is that of this test."""
    printed = ""
    steps = 2
    python = Path(sys.executable)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}

    def shell(line: str) -> list[str]:
        nonlocal printed
        if line.startswith(("[ -d ", "cd ")) or " pip " in line:
            return []
        if SCRIPT.match(line):
            line += f" --max_steps {steps}"
        result = subprocess.run(
            ["bash", "-c", line],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=600,
        )
        assert result.returncode == 0, line
        printed += result.stdout
        return result.stdout.splitlines()

    run_notebook(notebook, shell, {"RUN": str(tmp_path)})
    recording = next(tmp_path.rglob("*.wav"))
    steps = 3
    run_notebook(notebook, shell, {"RUN": str(tmp_path), "RECORDING": str(recording)})
    assert "resuming from" in printed and "evaluation at step 3 " in printed
    assert (tmp_path / "phone/model.int8.onnx").is_file()
