"""HTML of the page: hostile texts, and numbers that cannot be drawn."""

import math

import pytest

from webui import views
from webui.runs import Run
from webui.tabs import export

HOSTILE = '<img src=x onerror="alert(1)">\n\n</pre>\udce9'


@pytest.mark.parametrize(
    "made",
    [
        views.text(HOSTILE),
        views.player(HOSTILE),
        views.download(HOSTILE),
        views.log(HOSTILE),
        views.table([HOSTILE], [], HOSTILE),
        views.bars(HOSTILE, [(HOSTILE, 1)], HOSTILE),
        views.difference(HOSTILE, HOSTILE.upper()),
        views.curves(HOSTILE, {HOSTILE: [(1, 1)]}, HOSTILE),
    ],
)
def test_a_text_stays_text(made):
    assert "<img" not in made.lower() and "\n" not in made
    made.encode()


def test_numbers_that_cannot_be_drawn():
    points = [(1, 1e308), (2, -1e308), (1e308, 1), (math.nan, 1), (3, math.inf)]
    assert "nothing is measured" in views.curves("Loss", {"a": points})
    assert "ends at 2" in views.curves("Loss", {"a": [(1, 2), *points]})


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e300, -1e300, "now", []])
def test_what_is_no_time(seconds):
    assert views.moment(seconds) == ""
    assert views.moment(0).startswith("19")


def test_an_export_is_no_link(tmp_path):
    (tmp_path / "export-1").mkdir()
    (tmp_path / "export-2").symlink_to("/")
    run = Run("run", tmp_path, "", {}, [], 0)
    assert export._folders(run) == [tmp_path / "export-1"]
