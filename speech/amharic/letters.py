"""The Ethiopic letters: their sounds, from the Unicode names of the syllables, and which of them
sound alike."""

import re
import unicodedata

BLOCKS = ((0x1200, 0x139F), (0x2D80, 0x2DDF), (0xAB00, 0xAB2F), (0x1E7E0, 0x1E7FF))
# The consonant part of a name. Consonants that Amharic lacks become its nearest ones.
CONSONANTS = dict(
    pair.split(":")
    for pair in (
        "H:h HH:h X:h KX:h L:l M:m SZ:s S:s R:r SH:š Q:k' QH:k' B:b V:v T:t C:č N:n NY:ñ K:k W:w"
        " Z:z ZH:ž Y:y D:d DD:d J:j G:g GG:ng TH:t' CH:č' PH:p' TS:s' TZ:s' F:f P:p SS:š CC:č ZZ:ž"
        " CCH:č' QY:k'y KY:ky XY:hy GY:gy HHY:hy RY:ry MY:my FY:fy TTH:t' DDH:d DZ:dz CCHH:č' BB:b"
        " GLOTTAL: PHARYNGEAL:"
    ).split()
)
ORDERS = {"A": "ə", "U": "u", "I": "i", "AA": "a", "EE": "e", "E": "ı", "O": "o", "OA": "wa"}
FIRST_IS_A = ("H", "HH", "X", "GLOTTAL", "PHARYNGEAL", "RY", "MY", "FY")  # ሀ, not hə


def _syllables() -> dict[str, tuple[str, str]]:
    """(consonant, vowel) of every Ethiopic syllable. A glottal consonant is an empty string, and w
    belongs to a vowel."""
    names = {}
    for first, last in BLOCKS:
        for c in map(chr, range(first, last + 1)):
            name = unicodedata.name(c, "")
            if name.startswith("ETHIOPIC SYLLABLE "):
                names[c] = name.removeprefix("ETHIOPIC SYLLABLE ").replace(" ", "_")
    pattern = re.compile(f"(SEBATBEIT_|GURAGE_)?({'|'.join(CONSONANTS)})_?(W?)({'|'.join(ORDERS)})")
    rows = set(names.values())
    syllables = {}
    for c, name in names.items():
        labial, consonant, w, order = pattern.fullmatch(name).groups()
        vowel = w.lower() + ORDERS[order]
        if order == "A" and consonant in FIRST_IS_A:
            vowel = "a"
        elif name.endswith("WA") and w and not labial and f"{consonant}WAA" not in rows:
            vowel = "wa"  # ሏ; the row of ቋ has both
        syllables[c] = CONSONANTS[consonant], "ə" if name == "GLOTTAL_WA" else vowel
    return syllables


def _class() -> str:
    """The syllables as ranges for a character class of a regular expression."""
    codes = sorted(map(ord, SYLLABLES))
    firsts = [code for code in codes if chr(code - 1) not in SYLLABLES]
    lasts = [code for code in codes if chr(code + 1) not in SYLLABLES]
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in zip(firsts, lasts, strict=True))


SYLLABLES = _syllables()
_first: dict[tuple[str, str], int] = {}
# Of the letters with the same sound, the first.
HOMOPHONES = {ord(c): _first.setdefault(sound, ord(c)) for c, sound in SYLLABLES.items()}
GEMINATION, LENGTH = "\u135d\u135f", "\u135e"  # marks on a letter
LETTERS = _class()
LETTER = f"[{LETTERS}]"
WORD = re.compile(f"{LETTER}[{LETTERS}{GEMINATION}{LENGTH}]*")
ETHIOPIC = "[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in BLOCKS) + "]"
