"""What the texts of a recogniser's sets show before training: rare letters and letters that look
alike, codes in place of words, and letters that do not fit the seconds.

Whole columns are looked at, because a set may have five million texts."""

import itertools
import unicodedata
from collections import Counter
from dataclasses import dataclass

import numpy as np

from speech.data.columns import Corpus, Strings, printable
from speech.writing.text import is_letter
from speech.writing.unknown import named, shown

CODE_POINTS = 0x110000
PART = 1 << 16  # texts that are looked at together
LETTER, MARK = 1, 2  # kinds of characters
# Scripts whose letters look alike, and which are seldom mixed in a word on purpose.
ALPHABETS = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "COPTIC", "CHEROKEE")
# Characters that are typed for one another. Those of ALPHABETS are also found in words that mix
# them.
LOOK_ALIKES = (
    "'’ʼʻ‘ꞌˈʹ`´", ":꞉ː", "-\u2010\u2011", "|।ǀ", "!ǃ",
    "ɛεє", "ƐԐ", "ɔω", "əǝә", "ƏƎӘ", "gɡ", "ŋηƞ", "ɣγ", "ɩι", "ʋυ", "ɑα", "ꞵβß", "ɵθө", "ʔɂ", "ʒӡȝ",
    "ĐÐƉ", "şș", "ŞȘ", "ţț", "ŢȚ", "يی", "كک", "هہ",
)  # fmt: skip
NO_WORDS = frozenset("sp spn sil xxx nan none null n/a unk <unk> <eps> noise".split())
NAMED = 12  # characters in a line
WORDS = 3  # in a line
LONGEST = 20  # characters of a word or a text in a line
FOREIGN = 5  # letters of a second alphabet in a line
MIXED = 1000  # texts from which the letters of a second alphabet are taken

# A text is shared by many rows if it is in so many, in this share of all, and in so many times more
# than most texts are: sentences that every speaker reads are no codes.
SHARED = 10
SHARE = 0.01
OFTENER = 10

BLOCK = 50  # texts whose letters are compared with their seconds together
SHIFTED = 0.4  # the least correlation with neighbours, and its least gain
FEW_BLOCKS = 0.005  # share of the blocks, which may be so by chance
UNRELATED = 0.15  # the correlation of a set of texts that belong to other audio
MANY = 100  # texts, that are enough to say so
SPREAD = 0.15  # deviation of the logarithms of lengths, without which nothing can be compared


@dataclass(frozen=True)
class Census:
    """What N texts are written with."""

    counts: Counter[str]  # of the characters
    letters: np.ndarray  # (N,) of each text, with marks
    scripts: np.ndarray  # (N,) of their first letters, by number
    mixed: np.ndarray  # (M,) rows in which a word has letters of two ALPHABETS


class _Kinds:
    """What is known of the characters that occurred, by their code points."""

    def __init__(self):
        self.known = np.zeros(CODE_POINTS, dtype=bool)
        self.kinds = np.zeros(CODE_POINTS, dtype=np.uint8)
        self.scripts = np.zeros(CODE_POINTS, dtype=np.int16)
        self.alphabets = np.zeros(CODE_POINTS, dtype=np.uint8)
        self.numbers: dict[str, int] = {"": 0}  # of scripts

    def add(self, codes: np.ndarray) -> None:
        for code in codes[~self.known[codes]].tolist():
            character = chr(code)
            self.known[code] = True
            if unicodedata.category(character)[0] == "M":
                self.kinds[code] = MARK
            elif is_letter(character):
                script = script_of(character)
                self.kinds[code] = LETTER
                self.scripts[code] = self.numbers.setdefault(script, len(self.numbers))
                if script in ALPHABETS:
                    self.alphabets[code] = 1 + ALPHABETS.index(script)


def script_of(character: str) -> str:
    """The script of a letter, as the first word of its name in Unicode; "" without a name."""
    return unicodedata.name(character, "").split(" ")[0]


def take_census(texts: Strings | list[str]) -> Census:
    """The census of texts."""
    kinds = _Kinds()
    counts = np.zeros(CODE_POINTS, dtype=np.int64)
    columns: dict[str, list[np.ndarray]] = {"letters": [], "scripts": [], "mixed": []}
    rows = iter(texts)
    for first in range(0, len(texts), PART):
        part = list(itertools.islice(rows, PART))
        joined = " ".join([*part, ""]).encode("utf-32-le", "surrogatepass")
        codes = np.frombuffer(joined, dtype=np.uint32)
        ends = np.cumsum(np.fromiter((len(text) + 1 for text in part), np.int64, len(part)))
        occurrences = np.bincount(codes, minlength=CODE_POINTS)
        kinds.add(np.flatnonzero(occurrences))
        counts += occurrences
        starts = np.concatenate([[0], ends[:-1]])
        kind = kinds.kinds[codes]
        sums = np.concatenate([[0], np.cumsum(kind > 0)])
        columns["letters"].append(sums[ends] - sums[starts])
        # The first letter of each text, if it has one.
        letters = np.append(np.flatnonzero(kind == LETTER), len(codes))
        places = letters[np.searchsorted(letters, starts)]
        scripts = np.append(kinds.scripts[codes], 0)[places]
        columns["scripts"].append(np.where(places < ends, scripts, 0))
        bare = np.flatnonzero(kind != MARK)
        alphabets = kinds.alphabets[codes[bare]]
        is_mixed = (alphabets[1:] != alphabets[:-1]) & (alphabets[1:] > 0) & (alphabets[:-1] > 0)
        mixed = np.searchsorted(ends, bare[1:][is_mixed], side="right")
        columns["mixed"].append(first + np.unique(mixed))
    whole = {
        name: np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        for name, parts in columns.items()
    }
    occurring = np.flatnonzero(counts).tolist()
    return Census(Counter({chr(code): int(counts[code]) for code in occurring}), **whole)


# --- letters --------------------------------------------------------------------------------------


def letters_line(counts: Counter[str]) -> str:
    """How many characters there are, without regard to case, and the rarest of them. A letter of
    another alphabet than most has its name, because it may look like one of theirs."""
    folded: Counter[str] = Counter()
    scripts: Counter[str] = Counter()
    for character, count in counts.items():
        if character.isspace():
            continue
        lower = character.lower()
        folded[lower if len(lower) == 1 else character] += count
        if character.isalpha():
            scripts[script_of(character)] += count
    main = scripts.most_common(1)[0][0] if scripts else ""
    ordered = sorted(folded.items(), key=lambda pair: (pair[1], pair[0]))
    parts = []
    for character, count in ordered[:NAMED]:
        name = shown(character)
        if name == character and character.isalpha() and script_of(character) != main:
            name = coded(character)
        parts.append(f"{name} x {count:,}")
    return f"characters: {len(folded)} different ones, the rarest: {', '.join(parts)}"


def look_alikes(counts: Counter[str]) -> list[str]:
    """A part of a sentence for each row of LOOK_ALIKES of which several characters occur."""
    parts = []
    for row in LOOK_ALIKES:
        present = [character for character in row if counts[character]]
        if len(present) > 1:
            named = [f"{each} (U+{ord(each):04X}) x {counts[each]:,}" for each in present]
            parts.append(" and ".join(named))
    return parts


def mixed_line(sets: list[tuple[Strings, Census]]) -> str:
    """A sentence about the words of sets of texts that have letters of two alphabets, or ""."""
    total = sum(len(census.mixed) for _, census in sets)
    if not total:
        return ""
    words: dict[str, None] = {}
    letters: Counter[str] = Counter()
    for texts, census in sets:
        for row in census.mixed[:MIXED].tolist():
            for word in texts[row].split():
                letters_of_word = [each for each in word if script_of(each) in ALPHABETS]
                if len({script_of(each) for each in letters_of_word}) > 1:
                    words[word] = None
                    letters.update(letters_of_word)
    scripts: Counter[str] = Counter()
    for letter, count in letters.items():
        scripts[script_of(letter)] += count
    main = scripts.most_common(1)[0][0]
    foreign = [each for each, _ in letters.most_common() if script_of(each) != main]
    examples = ", ".join(printable(word)[:LONGEST] for word in list(words)[:WORDS])
    return (
        f"words with letters of two alphabets in {total:,} of"
        f" {sum(len(texts) for texts, _ in sets):,} texts, such as {examples}:"
        f" {', '.join(map(coded, foreign[:FOREIGN]))} beside {main.capitalize()} letters"
    )


def coded(letter: str) -> str:
    """A letter that may look like one of another script, for a message."""
    return f"{script_of(letter).capitalize()} {letter} (U+{ord(letter):04X})"


# --- codes in place of words ----------------------------------------------------------------------


def no_words(texts: Strings, letters: np.ndarray) -> Counter[str]:
    """The counts of texts that are hardly words: many rows share them, or they have no letters."""
    hashes = np.fromiter(map(hash, texts), np.int64, len(texts))
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    most = max(SHARED, SHARE * len(texts))
    is_shared = counts >= most
    is_shared &= (counts >= OFTENER * np.median(counts)) | (counts > len(texts) / 2)
    codes: Counter[str] = Counter()
    repeated = (counts > 1) | (letters[first] == 0)
    for place in np.flatnonzero(repeated).tolist():
        text = texts[int(first[place])]
        is_code = text.lower() in NO_WORDS or not any(map(str.isalnum, text))
        if text and (is_shared[place] or is_code):
            codes[text] = int(counts[place])
    return codes


def named_texts(counts: Counter[str]) -> str:
    """Texts with their counts, the most frequent first."""
    return named(counts, NAMED, lambda text: f"`{printable(text)[:LONGEST]}`")


# --- letters and seconds --------------------------------------------------------------------------


def shift_line(corpus: Corpus, lengths: np.ndarray, rows: np.ndarray) -> str:
    """What is said of texts that belong to other audio, "" if nothing is. `lengths` (M,): the
    logarithms of the seconds that texts take by their letters; `rows` (M,): their places in the
    corpus."""
    seconds = np.log(corpus.seconds[rows])
    count = len(rows)
    if count < BLOCK or min(np.std(lengths), np.std(seconds)) < SPREAD:
        return ""
    starts = np.append(np.arange(0, count - BLOCK, BLOCK), count - BLOCK)
    places = starts[:, None] + np.arange(BLOCK)
    x, y = lengths[places], seconds[places]
    own = correlation(x, y)
    moved = np.maximum(correlation(x[:, 1:], y[:, :-1]), correlation(x[:, :-1], y[:, 1:]))
    is_shifted = (moved > SHIFTED) & (moved - own > SHIFTED)
    if is_shifted.sum() > FEW_BLOCKS * len(starts):
        first, last = np.flatnonzero(is_shifted)[[0, -1]].tolist()
        while first > 0 and moved[first - 1] > own[first - 1]:
            first -= 1
        while last < len(starts) - 1 and moved[last + 1] > own[last + 1]:
            last += 1
        ends = places[first, 0], places[last, -1]
        first, last = (int(corpus.lines[rows[place]]) for place in ends)
        return (
            f"texts of the lines {first:,} to {last:,} fit the length of the row before or after"
            " them, and not their own audio's: are they shifted by one row?"
        )
    together = float(correlation(lengths[None], seconds[None])[0])
    if count >= MANY and together < UNRELATED:
        return (
            f"long texts do not belong to long audio (correlation {together:.2f}): are the texts"
            " those of other rows?"
        )
    return ""


def correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(B,) the correlations of the rows of x and y (B, N); 0 for a row without deviation."""
    x, y = (each - each.mean(1, keepdims=True) for each in (x, y))
    scale = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return np.divide((x * y).sum(1), scale, out=np.zeros(len(x)), where=scale > 1e-9)
