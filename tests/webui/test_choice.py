"""What the tabs share that let one choose a run."""

import pytest

from webui.catalogue import Option, Recipe
from webui.context import Context
from webui.places import Places
from webui.tabs.choice import RELEASED, Choice, changed, model_of, one_of


@pytest.mark.parametrize(
    ("names", "wanted", "before", "sent"),
    [
        (["a", "b"], "b", "a", {"value": "b"}),
        (["a", "b"], None, "b", {}),
        (["a", "b"], "gone", "b", {}),
        (["a", "b"], None, "gone", {"value": "a"}),
        (["a", "b"], "b", "b", {}),  # sent, it would undo what is chosen meanwhile
        ([], "a", "a", {"value": None}),
        ([], None, None, {}),
    ],
)
def test_a_value_that_stays_is_not_sent(names, wanted, before, sent):
    update = one_of(names, wanted, before)
    assert update.constructor_args == {"choices": names, **sent}


def test_changed():
    assert changed("a", "a") == {} and changed("a", None) == {"value": "a"}


def test_a_released_model_is_chosen_by_its_folder(tmp_path):
    (tmp_path / "data/base").mkdir(parents=True)
    recipe = Recipe("any", tmp_path / "any.py", options=(option("model_dir"), option("language")))
    context = Context(Places(tmp_path / "data", tmp_path / "runs"), {"any": recipe}, None)
    chosen = Choice(RELEASED, None, None, "any", "base", "vi", "CPU", False)
    assert model_of(context, chosen)[2].words == (
        f"--model_dir={tmp_path}/data/base",
        "--language=vi",
    )


def option(name: str) -> Option:
    is_path = name == "model_dir"
    return Option(name, f"--{name}", "", "", "", (), {}, ("DIR",), is_path, False, "")
