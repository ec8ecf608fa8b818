"""The anatomy of the recipes, read from the syntax trees."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from common import options
from recipes import (
    konkani_conformer,
    matcha_voice,
    parakeet_tdt,
    template,
    wav2vec2_ctc,
    whisper_morse,
    whisper_vietnamese,
    xtts_amharic,
)

ROOT = Path(__file__).resolve().parents[2]
RECOGNISERS = [
    konkani_conformer,
    parakeet_tdt,
    template,
    wav2vec2_ctc,
    whisper_morse,
    whisper_vietnamese,
]
RECIPES = [*RECOGNISERS, matcha_voice, xtts_amharic]
ORDER = ("add_arguments", "resolve", "Utterances", "collate", "compute_loss", "evaluate", "main")
SPEAKS = ("synthesise", "--synthesize")
USE = {matcha_voice: SPEAKS, xtts_amharic: SPEAKS}  # the function and the flag that use a model
METHODS = ("__len__", "fingerprint", "seconds", "item")
FLAGS = ("--evaluate", "--verify_gpu", "--use_chunking", "--transcribe", "--output")


def name_of(recipe) -> str:
    return recipe.RECIPE


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def parameters(function) -> list[str]:
    """The names of a function's parameters, without self."""
    a = function.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if arg]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def parser_of(recipe) -> options.Parser:
    parser = options.Parser(recipe.__doc__)
    recipe.add_arguments(parser)
    return parser


def test_every_recipe_is_examined():
    """Those that the README names: a user's copies are their own."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\(recipes/(\w+)\.md\)", readme))  # further pages of recipes, too
    named = {name for name in linked if (ROOT / f"recipes/{name}.py").exists()}
    assert set(map(name_of, RECIPES)) == named


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_the_parts_of_a_recipe_have_the_same_names_and_order(recipe):
    parts = {
        node.name: node for node in tree_of(Path(recipe.__file__)).body if hasattr(node, "name")
    }
    use = USE.get(recipe, ("transcribe", ""))[0]
    assert [name for name in parts if name in (*ORDER, use)] == [*ORDER[:-1], use, ORDER[-1]]
    assert all(callable(getattr(recipe.Utterances, name)) for name in METHODS)
    assert parameters(parts["compute_loss"])[:2] == ["model", "batch"]
    assert parameters(parts["evaluate"])[-2:] == ["model", "eval_batches"]
    assert parameters(parts["main"]) == ["args"]


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_describes_itself(recipe):
    lines = recipe.__doc__.splitlines()
    commands = [line for line in lines if line.startswith("    ")]
    assert len(commands) == 3
    assert all(f"python recipes/{recipe.RECIPE}.py" in line for line in commands)
    demo = commands[0].split("#")[0].strip()
    if recipe is not xtts_amharic:  # which has no demo
        assert demo == f"python recipes/{recipe.RECIPE}.py"
    assert "--resume" in commands[2] and USE.get(recipe, ("", "--transcribe"))[1] in commands[2]
    assert re.findall(r"^(Data|Memory|Sources): ", recipe.__doc__, re.MULTILINE) == [
        "Data",
        "Memory",
        "Sources",
    ]
    source = Path(recipe.__file__).read_text(encoding="utf-8")
    assert "\nRECIPE = Path(__file__).stem\n" in source  # a copy reads its own checkpoints


@pytest.mark.parametrize("recipe", RECOGNISERS, ids=name_of)
def test_what_holds_for_every_recogniser_exists_in_every_recogniser(recipe):
    actions = parser_of(recipe)._actions
    assert set(FLAGS) <= {flag for action in actions for flag in action.option_strings}
    assert all(action.help for action in actions)


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_the_short_help_is_short_and_the_other_one_whole(recipe):
    def listed(text: str) -> list[str]:
        return [line.strip().split("  ")[0] for line in text.splitlines() if line[:3] == "  -"]

    parser = parser_of(recipe)
    assert 20 <= len(listed(parser.format_usual())) <= 32
    flags = re.findall(r"--\w+", " ".join(listed(parser.format_help())))
    assert sorted(flags) == sorted(set(parser._option_string_actions) - {"-h"})


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_model_that_is_not_trained_further_is_loaded_by_one_function(recipe):
    """The page keeps what it returns. The words of a request tell what is done with the model, so
    nothing else may be loaded by `transcribe` or `synthesise`."""
    assert parameters(ast.parse(inspect.getsource(recipe.trained)).body[0])[1:] == ["setup"]
    use = getattr(recipe, USE.get(recipe, ("transcribe",))[0])
    assert inspect.getsource(use).count(" = trained(") == 1


@pytest.mark.parametrize("path", modules("speech"), ids=label)
def test_args_enter_speech_in_two_functions_only(path):
    named = {
        function.name for function in functions(tree_of(path)) if "args" in parameters(function)
    }
    assert named <= {"add_arguments", "resolve"}
