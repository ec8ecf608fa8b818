"""What the tabs share that let one choose a run."""

import pytest

from webui.tabs.choice import changed, one_of


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
