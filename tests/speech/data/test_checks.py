"""Checks of the speech that a TTS model learns from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError
from speech.data import checks, splits
from speech.data.columns import Codes, Corpus, Rejections, Strings, describe_utterances

# --- speech for synthesis -------------------------------------------------------------------------


def make_corpus(rows: list[tuple[str, float, str]]) -> Corpus:
    """A corpus of (text, seconds, speaker)."""
    count = len(rows)
    return Corpus(
        paths=Strings(f"/data/{i}.wav" for i in range(count)),
        texts=Strings(text for text, *_ in rows),
        seconds=np.array([seconds for _, seconds, _ in rows]),
        offsets=np.zeros(count),
        durations=np.full(count, np.nan),
        speakers=Codes(speaker for *_, speaker in rows),
        languages=Codes([""] * count),
        lines=np.arange(1, count + 1),
    )


def even(
    count: int, speaker: str = "a", letters: int = 30, seconds: float = 3.0
) -> list[tuple[str, float, str]]:
    return [(f"{i:02} " + "x" * letters, seconds, speaker) for i in range(count)]


def test_a_clip_with_anothers_text_is_far_from_its_speakers_rate():
    odd = [("x" * 60, 3.0, "a"), ("x" * 12, 3.0, "a")]
    slow = ("x" * 15, 3.0, "slow")
    corpus = make_corpus([*even(20), *odd, *even(20, "slow", 10), slow])
    problems = checks.speaking_rate(corpus)
    assert sorted(problems) == [20, 21]
    details = "20.0 letters a second, the speaker's median is 10.0"
    assert problems[20][1] == details and "is the text what is spoken?" in problems[20][0]
    # Too few clips to know the speaker.
    assert checks.speaking_rate(make_corpus([*even(17), *odd])) == {}


def test_rates_are_compared_within_a_language_and_a_script():
    """A letter of Amharic is a syllable, so English has twice as many letters a second."""
    english = [("x" * 60, 3.0, "a")] * 25
    amharic = [("ሰ" * 30, 3.0, "a")] * 40
    assert checks.speaking_rate(make_corpus([*english, *amharic])) == {}
    corpus = make_corpus([*english, *even(40)])
    assert sorted(checks.speaking_rate(corpus)) == list(range(25))
    corpus.languages = Codes(["en"] * 25 + ["vi"] * 40)
    assert checks.speaking_rate(corpus) == {}


def test_short_clips_vary_more():
    rows = [("x" * 18, 1.0, "a"), ("x" * 54, 3.0, "a"), ("x" * 50, 1.0, "a"), ("12!", 3.0, "a")]
    assert sorted(checks.speaking_rate(make_corpus([*even(30), *rows]))) == [31, 32]


@given(
    st.lists(st.tuples(st.integers(20, 60), st.floats(0.9, 1.1)), max_size=60), st.floats(0.2, 30.0)
)
def test_even_speech_is_kept_at_any_speed(clips, speed):
    rows = [("x" * letters, max(2.0, letters / speed) * factor, "a") for letters, factor in clips]
    rows = [(text, seconds, speaker) for text, seconds, speaker in rows if len(text) / speed >= 2.0]
    assert checks.speaking_rate(make_corpus(rows)) == {}


def test_speakers_with_little_speech_are_rejected_unless_all_have_little(capsys):
    problems = checks.little_speech(
        make_corpus([*even(3), ("b", 5.9, "b"), ("c", 6.0, "c"), ("d", 1.0, "")])
    )
    reason = "speaker has less than 6 s of speech"
    assert problems == {3: (reason, "b, 5.9 s"), 5: (reason, "without a name, 1.0 s")}
    assert checks.little_speech(make_corpus([("a", 5.0, "a"), ("b", 1.0, "b")])) == {}
    assert capsys.readouterr().out.startswith("warning: no speaker has 6 s of speech")


def test_overlap_is_noted():
    train = make_corpus([("one", 1.0, ""), ("two", 1.0, ""), ("three", 1.0, "")])
    other = make_corpus([("seven", 0.5, ""), ("three", 1.0, ""), ("six", 1.0, "")])
    other.offsets[1:] = 2.0
    noted = Rejections()
    checks.overlap(train, other, noted)
    assert noted.notes.examples == {
        "audio is in the training set, too": ["/data/0.wav"],
        "text is in the training set, too": ["/data/1.wav at 2.00 s: three"],
    }
    assert noted.total == 0


def test_texts_in_brackets_are_noted(capsys):
    marks = ["[beep]", "<unk>", "{breath}", "(unintelligible)", "*cough*", "+++"]
    texts = [(f"one {mark} two", 1.0, "") for mark in marks]
    splits.report_checked({"train": make_corpus([*texts, ("three * four + five", 1.0, "")])})
    out = capsys.readouterr().out
    assert "6  text in brackets is taken as it is written" in out and "0.wav: [beep]" in out


def test_utterances_are_counted_by_speaker_language_and_length():
    rows = [("t", 60.0 * (i + 1), f"s{i}") for i in range(12)]
    long = make_corpus(rows)
    short = make_corpus([("t", 30.0, "s11"), ("t", 60.0, "")])
    short.languages = Codes(["am", "am"])
    assert describe_utterances([long, short]).splitlines() == [
        "minutes by speaker:",
        "     12.5  s11",
        *(f"     {i + 1:4.1f}  s{i}" for i in range(10, 1, -1)),
        "      4.0  (3 more)",
        "minutes by language:",
        "     78.0  (no language given)",
        "      1.5  am",
        "utterances by length:",
        *(
            f"        {count}  {50 * number} to {50 * number + 50} s"
            for number, count in enumerate([1, 2, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1])
        ),
    ]
    name = "a\n<b>" + "x" * 100
    line = describe_utterances([make_corpus([("t", 6.0, name)])]).splitlines()[1]
    assert line == "      0.1  a\\n<b>" + "x" * 54


def test_the_training_set_is_described(capsys):
    rows = [(f"t{i}", 60.0 * (i + 1), f"s{i}") for i in range(23)]
    checks.describe(make_corpus(rows))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "training speech: 276.0 min of 23 speakers",
        "warning: no clip is under 2 s: the model will add noise to short texts",
    ]
    checks.describe(make_corpus([("a", 1.5, "")]))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "training speech: 0.0 min of 1 speaker",
        "warning: less than 3 minutes of training speech: the voice will hardly be learned",
    ]


def test_sets_are_checked_as_speech(capsys):
    sets = {
        "train": make_corpus([*even(25), ("x" * 90, 3.0, "a"), ("c", 1.0, "c")]),
        "val": make_corpus(even(2)),
    }

    def fault(corpus, index):
        text = corpus.texts[index]
        return ("text is numbered", text[:2]) if text[:2] == "07" else None

    checked = checks.check_speech(sets, False, fault)
    assert [len(corpus) for corpus in checked.values()] == [24, 2]
    out = capsys.readouterr().out
    for line in (
        "train set, checked as speech: 24 utterances, 1.2 min; 3 rejected:\n",
        "1  text is numbered",
        "1  speaker has less than 6 s of speech",
        "1  speaking rate is far from",
        "val set, checked as speech: 2 noted (all are used):\n        2  audio is in the training",
        "training speech: 1.2 min of 1 speaker\n",
    ):
        assert line in out
    with pytest.raises(DataError, match=r"3 utterances rejected \(--strict_data\)$"):
        checks.check_speech(sets, True, fault)
    good = {"train": make_corpus(even(25)), "test": make_corpus([("other", 2.5, "a")])}
    assert (
        checks.check_speech(good, True, lambda *_: None)["train"].fingerprint()
        == good["train"].fingerprint()
    )
