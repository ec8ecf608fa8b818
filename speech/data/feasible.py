"""Which texts CTC can align with their audio: it needs a frame for every token, and another for the
blank between two equal ones."""

import itertools
from collections.abc import Callable, Sequence

from speech.data.columns import Corpus, Rejections
from speech.data.splits import LEARNED_FROM, drop

TOO_LONG = "text is too long for its audio (CTC needs a frame a token)"
NOT_IN_LOSS = f"{TOO_LONG}: in no CTC loss"


def fits(frames: int, tokens: Sequence) -> bool:
    """Whether CTC can align the tokens with so many frames; if not, their loss is infinite."""
    repeats = sum(a == b for a, b in itertools.pairwise(tokens))
    return frames >= len(tokens) + repeats


def targets(frames: int, tokens: Sequence) -> int:
    """The tokens that the CTC loss of an utterance is divided by: none if it cannot be aligned. The
    loss itself is 0 then, with `zero_infinity`."""
    return len(tokens) if fits(frames, tokens) else 0


def without_infeasible(
    corpora: dict[str, Corpus],
    frames: Callable[[float], int],
    strict: bool,
    encode: Callable[[str], Sequence] = list,
    unknown: Sequence = (),
    trained: Sequence[str] = LEARNED_FROM,
) -> dict[str, Corpus]:
    """The corpora. Those that are `trained` on are without utterances that no CTC alignment fits,
    and without texts of `unknown` tokens alone, by `splits.drop`. Elsewhere such utterances are
    only noted: they are scored, but in no CTC loss. `frames(seconds)`: the frames of so much audio;
    `encode`: the tokens of a text, by default a character each. Raises `DataError`."""
    checked = {}
    for name, corpus in corpora.items():
        checked[name] = corpus
        if not len(corpus) or not corpus.paths[0]:  # a stand-in's texts are made up
            continue

        def fault(index: int, corpus: Corpus = corpus) -> tuple[str, str] | None:
            seconds = float(corpus.seconds[index])
            tokens = encode(corpus.texts[index])
            if unknown and {*tokens} <= {*unknown}:
                return "text is outside the vocabulary", corpus.texts[index][:60]
            if not fits(frames(seconds), tokens):
                return TOO_LONG, f"{len(tokens)} tokens in {seconds:.2f} s"
            return None

        if name in trained:
            checked[name] = drop(corpus, f"{name} set", fault, strict)
            continue
        rows = Rejections()
        for index in range(len(corpus)):
            problem = fault(index)
            if problem and problem[0] == TOO_LONG:
                rows.note(NOT_IN_LOSS, f"{corpus.where(index)}: {problem[1]}")
        if rows.notes:
            print(rows.noted(f"{name} set"))
    return checked
