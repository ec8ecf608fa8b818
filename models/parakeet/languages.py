"""The languages of a model that is told one: the names of its prompt's slots, and the tags with
which it ends sentences. A name that has several spellings is in several rows (de, de-DE)."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.errors import DataError, UsageError
from models.parakeet.tokenizer import ParakeetTokenizer
from speech.data.columns import Corpus
from speech.writing.text import SENTENCE_ENDS

AUTO = "auto"  # the slot of a language that the model has to find out
AUTO_SHARE = 0.5  # of the training utterances, as in NVIDIA's training
NAME = re.compile(r"[a-z]{2,3}-[A-Z]{2}")  # of a new language
NEAREST = 5  # names in a message
COLUMNS = "prompt_projector.linear_1.weight"  # (W, D + slots)
# The slots of the released models, for files that do not name them.
_SLOTS = """
    0 en-US en, 1 en-GB enGB, 2 es-ES esES, 3 es-US es, 4 zh-CN zh-ZH, 5 zh-TW, 6 hi-IN hi hi-HI,
    7 ar-AR ar, 8 fr-FR fr, 9 de-DE de, 10 ja-JP ja-JA, 11 ru-RU ru, 12 pt-BR, 13 pt-PT pt,
    14 ko-KR ko ko-KO, 15 it-IT it, 16 nl-NL nl, 17 pl-PL pl, 18 tr-TR tr, 19 uk-UA uk, 20 ro-RO ro,
    21 el-GR el, 22 cs-CZ cs, 23 hu-HU hu, 24 sv-SE sv, 25 da-DK da, 26 fi-FI fi, 27 no-NO no,
    28 sk-SK sk, 29 hr-HR hr, 30 bg-BG bg, 31 lt-LT lt, 32 th-TH, 33 vi-VN, 34 id-ID, 35 ms-MY,
    36 bn-IN, 37 ur-PK, 38 fa-IR, 39 ta-IN, 40 te-IN, 41 mr-IN, 42 gu-IN, 43 kn-IN, 44 ml-IN,
    45 si-LK, 46 ne-NP, 47 km-KH, 48 sw-KE, 49 am-ET, 50 ha-NG, 51 zu-ZA, 52 yo-NG, 53 ig-NG,
    54 af-ZA, 55 rw-RW, 56 so-SO, 57 ny-MW, 58 ln-CD, 59 or-KE, 60 et-EE et, 61 lv-LV lv,
    62 sl-SI sl, 64 he-IL, 65 ku-TR, 66 az-AZ, 67 ka-GE, 68 hy-AM, 69 uz-UZ, 70 tg-TJ, 71 ky-KG,
    80 qu-PE, 81 ay-BO, 82 gn-PY, 83 nah-MX, 96 mi-NZ, 97 haw-US, 98 sm-WS, 99 to-TO, 100 fr-CA,
    101 auto, 102 mt-MT, 103 nb-NO nb, 104 nn-NO nn
"""
SLOTS = {
    name: int(slot) for slot, *names in (row.split() for row in _SLOTS.split(",")) for name in names
}


def are_slots(names) -> bool:
    """Whether this is {name: slot}, from a file."""
    return type(names) is dict and all(
        type(name) is str and type(slot) is int and slot >= 0 for name, slot in names.items()
    )


def nearest(name: str, names: Iterable[str]) -> str:
    """The names that are most like this one, for a message."""
    by_small = {known.lower(): known for known in names}
    likest = [known for known in by_small if known[:2] == name.lower()[:2]]
    likest += difflib.get_close_matches(name.lower(), by_small, NEAREST, 0.3)
    return ", ".join(by_small[known] for known in list(dict.fromkeys(likest))[:NEAREST]) or AUTO


def slot_of(name: str, names: dict[str, int], flag: str) -> int:
    """The slot of the language that `flag` names. Raises `UsageError`."""
    if name not in names:
        raise UsageError(
            f"{flag} {name}: the model knows no such language; the nearest are"
            f" {nearest(name, names)}"
        )
    return names[name]


@dataclass(frozen=True)
class Prompts:
    """The languages that a model is told for the utterances of a corpus."""

    corpus: Corpus
    slots: list[int]  # by the number of a language's name in the corpus
    auto: int | None  # the slot of a language which is not told
    tags: dict[int, int]  # pieces by slot

    def slot(self, index: int, random: np.random.Generator | None = None) -> int:
        """That of an utterance's language or, in training, where it is `random`, in a share
        `AUTO_SHARE` the one for unknown languages, so that the model still finds out languages."""
        if random and self.auto is not None and random.random() < AUTO_SHARE:
            return self.auto
        return self.slots[self.corpus.languages.codes[index]]

    def tag(self, index: int) -> list[int]:
        """The piece that ends an utterance, if its text ends a sentence and the vocabulary has a
        tag of its language."""
        tag = self.tags.get(self.slot(index))
        ends = self.corpus.texts[index].rstrip().endswith(SENTENCE_ENDS)
        return [] if tag is None or not ends else [tag]


def prompts(
    corpus: Corpus, names: dict[str, int], usual: str | None, tokenizer: ParakeetTokenizer
) -> Prompts:
    """The prompts of a corpus. `names`: the model's slots; `usual`: the language of rows that name
    none. Raises `DataError` for a language that the model does not know."""
    codes = np.array(corpus.languages.codes, dtype=np.int64)
    slots = []
    for number, language in enumerate(corpus.languages.names):
        rows = np.flatnonzero(codes == number)
        is_stand_in = len(rows) and not corpus.paths[int(rows[0])]
        language = language or usual or (AUTO if is_stand_in else "")
        if language not in names and len(rows):
            what = f"{corpus.where(int(rows[0]))} and {len(rows) - 1:,} other utterances"
            if not language:
                raise DataError(
                    f"{what} have no language, which this model is told: add --language NAME, or"
                    ' the key "lang" to the manifest'
                )
            raise DataError(
                f"{what} are in {language[:40]!r}, which this model does not know; the nearest are"
                f" {nearest(language, names)}; to teach another language, make a model that knows"
                " it with python -m models.extend parakeet MODEL --new_language xx-YY --like NAME"
            )
        slots.append(names.get(language, 0))
    return Prompts(corpus, slots, names.get(AUTO), tags(names, tokenizer))


def tags(names: dict[str, int], tokenizer: ParakeetTokenizer) -> dict[int, int]:
    """The piece `<xx-YY>` of each slot, as far as the vocabulary has one."""
    by_slot = {}
    for name, slot in names.items():
        if name in tokenizer.tags:
            by_slot.setdefault(slot, tokenizer.tags[name])
    return by_slot


def with_new(
    names: dict[str, int], columns: Tensor, slots: int, name: str, like: str
) -> tuple[dict[str, int], Tensor]:
    """The names and the `columns` (W, D + slots) of `COLUMNS` with the language `name`, which
    begins as `like` in a free one of the `slots`. Raises `UsageError`."""
    if name in names:
        raise UsageError(
            f"--new_language {name}: the model knows this language already; train it with"
            " --language"
        )
    source = slot_of(like, names, "--like")
    free = sorted(set(range(slots)) - set(names.values()))
    if not free:
        raise UsageError(f"--new_language {name}: all {slots} slots of the model are taken")
    columns = columns.clone()
    first = columns.shape[1] - slots
    columns[:, first + free[0]] = columns[:, first + source]
    return {**names, name: free[0]}, columns
