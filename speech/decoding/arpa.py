"""A language model as an ARPA file, the form that other programs read."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from speech.decoding.ngram import NGram


def lines_of(model: NGram, names: dict[int, str]) -> Iterator[str]:
    """The lines of an ARPA file of the tokens that have names. There <s> and </s> stand for a mark
    at the beginning and at the end of a sentence, also of a mark that has no name."""
    grams = [()]  # of each node
    lines: list[list[str]] = [[] for _ in range(model.order)]
    contexts, tokens = np.divmod(model.keys, model.size)
    for place, (context, token) in enumerate(zip(contexts.tolist(), tokens.tolist(), strict=True)):
        gram = (*grams[context], token)
        if len(gram) < model.order:
            grams.append(gram)
        log_prob = f"{model.probabilities[place] / math.log(10):.6f}"
        back_off = ""
        if len(gram) < model.order:
            back_off = f"\t{model.back_off[place + 1] / math.log(10):.6f}"
        for words, is_end in written(gram, names, model.mark):
            first = "-99" if words == "<s>" else log_prob
            lines[len(gram) - 1].append(f"{first}\t{words}{'' if is_end else back_off}")
    unseen = f"{(model.back_off[0] - math.log(model.size)) / math.log(10):.6f}"
    seen = set(tokens[contexts == 0].tolist())
    lines[0] += [f"{unseen}\t{name}\t0" for token, name in names.items() if token not in seen]
    lines[0].append(f"{unseen}\t<unk>")
    yield "\\data\\"
    yield from (f"ngram {n}={len(rows)}" for n, rows in enumerate(lines, start=1))
    for n, rows in enumerate(lines, start=1):
        yield f"\n\\{n}-grams:"
        yield from rows
    yield "\n\\end\\"


def written(gram: tuple[int, ...], names: dict[int, str], mark: int) -> Iterator[tuple[str, bool]]:
    """The forms of an n-gram in an ARPA file, and whether a sentence ends with it."""
    words = [[names[token]] if token in names else [] for token in gram]
    if gram[0] == mark:
        words[0].append("<s>")
    if gram[-1] == mark:
        words[-1].append("</s>")
    for form in itertools.product(*words):
        yield " ".join(form), form[-1] == "</s>"
