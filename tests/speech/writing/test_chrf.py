"""chrF2 against sacrebleu 2.6 (`sacrebleu.corpus_chrf(hypotheses, [references]).score`)."""

import pytest

from speech.writing import chrf

FRENCH = "Il a flanqué des coups de poing à son ami en pleine figure"
PAIRS = [  # reference, hypothesis, score
    (FRENCH, "Il a frappé son ami", 15.5910096198825),
    ("Montre-moi ta blessure.", "Montre ta plaie.", 26.56182963407325),
    ("abc", "ab c", 100.0),
    ("", "", 0.0),
    ("", "a", 0.0),
    ("a", "", 0.0),
]


def rows(*pairs) -> list[dict]:
    return [{"reference": pair[0], "hypothesis": pair[1]} for pair in pairs]


@pytest.mark.parametrize("pair", PAIRS, ids=range(len(PAIRS)))
def test_a_sentence_has_the_score_of_sacrebleu(pair):
    assert 100 * chrf.of_corpus(rows(pair)) == pytest.approx(pair[2], abs=1e-9)


def test_a_corpus_has_the_score_of_sacrebleu():
    several = rows(*PAIRS[:2], ("Oui", ""))
    assert 100 * chrf.of_corpus(several) == pytest.approx(18.645643044950873, abs=1e-9)


def test_an_evaluation_has_the_mean_of_sentences():
    total, number = chrf.in_evaluation(rows(*PAIRS))["chrf"]
    assert number == len(PAIRS)
    assert 100 * total == pytest.approx(sum(pair[2] for pair in PAIRS))
