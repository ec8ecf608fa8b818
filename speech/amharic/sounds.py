"""Amharic words to phonemes: letters, the vowel ı where syllables need it, and a lexicon.

Phonemes are written with characters that XTTS-v2's vocabulary has: ə for the first vowel order, ı
for the sixth, ' after ejectives, č š ž ñ. The script writes neither gemination nor the absence of
the sixth vowel. A lexicon gives gemination; syllable structure decides where ı is heard. Glottal
stops are silent. The rule for ı is a heuristic.
"""

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache

from common.errors import UsageError
from common.files import read_text
from speech.amharic.letters import GEMINATION, HOMOPHONES, SYLLABLES, WORD
from speech.amharic.reading import spoken

PHONEMES = "abcdefghijklmnopqrstuvwxyzäəčšžñı'"
_PRONUNCIATION = re.compile(f"[{PHONEMES} :]*[{PHONEMES[:-1]}][{PHONEMES} :]*")


def phonemes(text: str, lexicon: Mapping[str, str] | None = None, epenthesis: bool = True) -> str:
    """The phonemes of Amharic text, after `spoken`: `PHONEMES`, spaces and sentence marks.
    `lexicon`: from `read_lexicon`, {word: phonemes}. `epenthesis`: whether the vowel ı is written
    where syllables need it, or after every consonant in the sixth order that does not end its
    word."""

    def pronounce(match: re.Match) -> str:
        word = match[0]
        if lexicon and (listed := lexicon.get(word) or lexicon.get(word.translate(HOMOPHONES))):
            return listed
        return _pronounce(word, epenthesis)

    return WORD.sub(pronounce, spoken(text))


def read_lexicon(path: str) -> dict[str, str]:
    """The pronunciations in a UTF-8 file with lines `word<TAB>phonemes`; blank lines and lines that
    begin with # are ignored. Homophone letters are merged, so that ዓለም in the file also pronounces
    አለም. Raises `UsageError`."""
    lexicon: dict[str, str] = {}
    for number, line in enumerate(read_text(path, "--lexicon").split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        word, tab, pronunciation = unicodedata.normalize("NFC", line).partition("\t")
        word = word.strip()
        pronunciation = pronunciation.lower().strip()
        place = f"--lexicon {path}, line {number}"
        if not (tab and WORD.fullmatch(word) and _PRONUNCIATION.fullmatch(pronunciation)):
            raise UsageError(
                f"{place}: {line[:60]!r} is not a word in Ethiopic letters, one tab and its"
                f" phonemes, which are written with {PHONEMES}"
            )
        if lexicon.setdefault(word, pronunciation) != pronunciation:
            raise UsageError(
                f"{place}: {word} already has the phonemes {lexicon[word]!r}; keep one of the lines"
            )
    merged = {}
    for word, pronunciation in lexicon.items():
        merged.setdefault(word.translate(HOMOPHONES), pronunciation)
    return merged | lexicon


@lru_cache(maxsize=2**16)
def _pronounce(word: str, epenthesis: bool) -> str:
    """The phonemes of one word in Ethiopic letters."""
    consonants = []
    vowels = []
    is_long = []
    for c in word:
        if c in SYLLABLES:
            consonant, vowel = SYLLABLES[c]
            consonants.append(consonant)
            vowels.append(vowel)
            is_long.append(False)
        elif c in GEMINATION:
            is_long[-1] = True
    if epenthesis:
        vowels = _epenthesis(consonants, vowels, is_long)
    elif vowels[-1] == "ı":
        vowels[-1] = ""
    sounds = ""
    for consonant, vowel, long in zip(consonants, vowels, is_long, strict=True):
        sounds += (consonant[:1] if long else "") + consonant + vowel
    return sounds.replace("ıı", "ı") or "ı"


def _epenthesis(consonants: list[str], vowels: list[str], is_long: list[bool]) -> list[str]:
    """The vowels of a word, without the ı that syllables do not need. A syllable is CV or CVC, and
    CVCC at the end of a word. From left to right, a consonant in the sixth order closes an open
    syllable or begins one with ı."""
    vowels = list(vowels)
    is_open = False
    for i, vowel in enumerate(vowels):
        left = len(vowels) - i - 1  # letters after this one
        if vowel != "ı":
            is_open = True
        elif left == 0:
            vowels[i] = ""
        elif is_open and _closes(consonants[i : i + 4], vowels[i : i + 4], is_long[i]):
            vowels[i] = ""
            is_open = False
        else:
            is_open = True
            continue
        if left == 1 and vowels[i] == "" and vowels[i + 1] == "ı":
            vowels[i + 1] = ""  # the second consonant of a final cluster
            break
    return vowels


def _closes(consonants: list[str], vowels: list[str], is_long: bool) -> bool:
    """Whether the first of the remaining consonants closes the open syllable before it. Of more
    than four, the first four."""
    if is_long or consonants[0] == "":
        return False
    if vowels[1] != "ı":
        return True
    if consonants[0] == consonants[1]:
        return False  # a geminate is written once, so there is a vowel between two
    if len(consonants) == 2:
        return _ends_a_word(*consonants)
    # አምስት, ስድስት: a final -t forms a cluster, so that ı precedes the cluster
    is_cluster = len(consonants) == 3 and vowels[2] == "ı" and consonants[2] == "t"
    return not (is_cluster and _ends_a_word(*consonants[1:]))


def _ends_a_word(first: str, second: str) -> bool:
    """Whether two consonants can end a word: sonority falls, or both are obstruents. The suffixes
    -h and -š follow ı."""
    if first == "" or second in ("h", "š"):
        return False
    return _sonority(first) > _sonority(second) or _sonority(first) == _sonority(second) == 0


def _sonority(consonant: str) -> int:
    for kind, value in {"wy": 3, "lr": 2, "mnñ": 1}.items():
        if consonant[-1:] in kind:
            return value
    return 0
