"""How long torch's waiting CPU threads spin is set before torch is loaded."""

import ast
import sys
from pathlib import Path

import pytest

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.py"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_sets_it_before_it_imports_anything_else(recipe):
    seen = []
    for statement in ast.parse(recipe.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module = getattr(statement, "module", None) or statement.names[0].name
            if module.split(".")[0] not in sys.stdlib_module_names:
                seen.append(module)
        elif isinstance(statement, ast.Expr) and "spin_briefly" in ast.unparse(statement):
            break
    assert seen == ["common"]
