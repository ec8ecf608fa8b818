"""The verdict and its exit status, and the text of a report."""

import re

import pytest

from dry_run.cards import CONTEXT, GIB, MIB, Card, find_card, workspace
from dry_run.peak import PARTS, Peak
from dry_run.report import describe, needed, room, verdict

CARD = find_card("8gb")


def peak_of(total: int, **changes) -> Peak:
    parts = dict.fromkeys(PARTS, 0) | {"activations": total}
    fields = {"parts": parts, "kernels": 0, "module": "", "phase": "forward", "guesses": 0}
    return Peak(**fields | changes)


@pytest.mark.parametrize("name", ["8gb", "t4", "h100", "0.4"])
def test_verdicts_change_at_the_margin_and_at_the_cards_memory(name):
    card = find_card(name)
    whole = card.total - workspace(card) - CONTEXT
    assert needed(peak_of(whole), card) == card.total
    assert needed(peak_of(room(card)), card) == pytest.approx(0.9 * card.total, abs=1)
    assert verdict(peak_of(room(card)), card) == ("fits", 0)
    assert verdict(peak_of(room(card) + 1), card) == ("tight", 0)
    assert verdict(peak_of(whole), card) == ("tight", 0)
    assert verdict(peak_of(whole + 1), card) == ("does not fit", 3)


def report_of(
    peak: Peak, card: Card = CARD, what: str = "whisper small, 8 x 3"
) -> tuple[str, dict[str, str]]:
    """The report, and its table: name -> size."""
    text = describe(peak, card, what)
    return text, dict(re.findall(r"^  (\S.*?) {2,}(-?[\d.]+ [GM]iB)$", text, re.MULTILINE))


def test_the_report_has_every_size():
    parts = dict(zip(PARTS, (i * GIB // 4 for i in range(1, 7)), strict=True))
    peak = Peak(parts, 50 * MIB, "encoder.3.first", "backward", 0)
    text, table = report_of(peak)
    assert text.startswith("Dry run: whisper small, 8 x 3\n")
    sizes = "0.25 GiB, 0.50 GiB, 0.75 GiB, 1.00 GiB, 1.25 GiB, 1.50 GiB, 50.0 MiB, 48.2 MiB"
    assert [*table.values()] == [*sizes.split(", "), "0.50 GiB", "5.85 GiB", "7.70 GiB", "1.85 GiB"]
    assert [*table][:6] == [*PARTS] and [*table][-3:] == ["total", "8gb", "left"]
    assert "Peak: 5.30 GiB allocated in training, backward, in encoder.3.first\n" in text
    assert "Verdict: fits (it fits if 10 % of the card stays free)\n" in text
    assert "guessed" not in text
    rows = text.splitlines()[1:13]
    assert len({len(row) for row in rows}) == 1, "the sizes are not in one column"


def test_what_is_missing_and_what_was_guessed():
    text, table = report_of(peak_of(8 * GIB, guesses=7))
    assert table["missing"] == "0.85 GiB"
    assert "left" not in table
    assert "outside any module" in text
    assert "Verdict: does not fit (" in text
    assert "guessed: 7\n" in text
    assert "\nNot planned: cuDNN" in text


def test_the_other_stage_is_told():
    evaluation = peak_of(2 * GIB, stage="evaluation", utterances=8)
    text = describe(peak_of(3 * GIB), CARD, "whisper", [evaluation])
    assert "Peak: 3.00 GiB allocated in training, " in text
    assert "\nIn evaluation, with 8 utterances at a time: 2.00 GiB\n" in text
    text = describe(evaluation, CARD, "whisper", [peak_of(GIB, utterances=4)])
    assert "Peak: 2.00 GiB allocated in evaluation, " in text
    assert "with 8 utterances at a time\nIn training" in text
    assert "\nIn training, with 4 utterances at a time: 1.00 GiB\n" in text
