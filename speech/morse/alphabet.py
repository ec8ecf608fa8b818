"""Morse code: its symbols, and how a text is written in them."""

import re

# Prosigns that sound like a character are written as that character: AR is +, BT is =, KN is (. The
# multiplication sign is X. The other prosigns have labels of their own: <SK> end of work, <AS>
# wait, <HH> error (eight dits).
MORSE = dict(
    pair.split()
    for pair in """A .-|B -...|C -.-.|D -..|E .|F ..-.|G --.|H ....|I ..|J .---|K -.-|L .-..|M --|N -.|O ---|P .--.
    |Q --.-|R .-.|S ...|T -|U ..-|V ...-|W .--|X -..-|Y -.--|Z --..|É ..-..|0 -----|1 .----|2 ..---|3 ...--|4 ....-
    |5 .....|6 -....|7 --...|8 ---..|9 ----.|. .-.-.-|, --..--|: ---...|? ..--..|' .----.|- -....-|/ -..-.|( -.--.|) -.--.-
    |" .-..-.|= -...-|+ .-.-.|@ .--.-.|<SK> ...-.-|<AS> .-...|<HH> ........""".split("|")
)
SYMBOLS = (" ", *MORSE)  # a label for everything that can be heard; each is one token
PROSIGNS = {"<AR>": "+", "<BT>": "=", "<KN>": "(", "×": "X"}  # other names of the same sounds
CALLSIGN = re.compile(
    r"(?![A-R]{2}\d\d[A-X]{2}$)"  # a locator, like FN31PR
    r"(?:[A-Z0-9]{1,4}/)?(?:[A-Z]{1,2}|[A-Z]\d|\d[A-Z])\d{1,3}[A-Z]{1,4}(?:/[A-Z0-9]{1,3})?"
)


def symbols(text: str) -> list[str]:
    """The labels of a text, in order. Characters that are not labels are returned as they are."""
    return re.findall(r"<(?:SK|AS|HH)>|.", text)


def normalise(text: str) -> str:
    """A text in the labels of this file: upper case, single spaces, one label per sound."""
    text = " ".join(text.upper().split())
    for name, label in PROSIGNS.items():
        text = text.replace(name, label)
    return text
