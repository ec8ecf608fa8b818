"""HTML of the page: hostile texts, and numbers that cannot be drawn."""

import pytest

from webui import views

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
        views.curves(HOSTILE, {HOSTILE: [(1, 1)]}),
    ],
)
def test_a_text_stays_text(made):
    assert "<img" not in made.lower() and "\n" not in made
    made.encode()
