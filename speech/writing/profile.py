"""Orthography profiles (Moran and Cysouw 2018): what a letter is.

    python -m speech.writing.profile train.json --output profile.tsv    # a first one, to be edited
    python recipes/konkani_conformer.py --profile profile.tsv --train_manifest train.json

A profile is a table of tabs, as `segments` of CLDF reads it. Its column Grapheme has the units of a
language: ts͡ʰ can be one, and a tone mark can be one beside its vowel. Its column Text, which may be
missing, says what a unit is in the texts that are learned: itself, other units, NULL (it vanishes)
or SPACE (it splits words). Other columns are for people.

A text is read in Unicode's decomposed form (NFD) from left to right, the longest unit first, as
`segments` does it. All that comes out is composed (NFC), as texts are here."""

import argparse
import csv
import functools
import io
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common import files
from common.errors import UsageError, exit_with_one_line
from common.records import mismatch
from speech.data.annotations.rows import READERS, is_annotations
from speech.data.annotations.rows import choose as choose_tiers
from speech.data.columns import Corpus, Rejections, Segments
from speech.data.finding import TABLES
from speech.data.manifest import Checks, read_manifest
from speech.writing import unknown
from speech.writing.text import normalise

GRAPHEME, TEXT = "Grapheme", "Text"  # the columns that are used
NULL, SPACE = "NULL", "SPACE"  # in TEXT
MOST = 10_000  # units
LONGEST = 64  # characters of a unit, decomposed
ADD_LINES = "add lines to the profile, in a new run with another --output_dir"
TIES = "\u035c\u0361"  # the letters on both sides are one
TONES = "\u0300\u0301\u0302\u0304\u030b\u030c\u030f\u1dc4\u1dc5\u1dc6\u1dc7\u1dc8\u1dc9"

decomposed = functools.partial(unicodedata.normalize, "NFD")
composed = functools.partial(unicodedata.normalize, "NFC")


@dataclass(frozen=True)
class Profile:
    """`rows`: each unit with the text that it becomes; both composed."""

    rows: tuple[tuple[str, str], ...]

    @functools.cached_property
    def units(self) -> list[str]:
        """What a model learns: units that become themselves."""
        return [unit for unit, text in self.rows if unit == text]

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """What units become, both decomposed."""
        return {decomposed(unit): decomposed(text) for unit, text in self.rows}

    @functools.cached_property
    def pattern(self) -> re.Pattern:
        longest_first = sorted(self.texts, key=len, reverse=True)
        return re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)

    def prepare(self, text: str) -> str:
        """A text as it is learned. Characters that the profile lacks stay."""
        parts = self.pattern.findall(decomposed(normalise(text)))
        return normalise("".join(self.texts.get(part, part) for part in parts))

    def cut(self, text: str) -> list[str]:
        """The units of a prepared text, its spaces, and characters that the profile lacks."""
        return [*map(composed, self.pattern.findall(decomposed(text)))]

    def joined(self, letters: Iterable[str]) -> str:
        return composed("".join(letters))

    def vocabulary(self, texts: Iterable[str]) -> list[str]:
        """The space and the units, whatever the texts have."""
        return [" ", *self.units]

    def kept(self) -> list[list[str]]:
        """The rows as lists, for a checkpoint."""
        return [[*row] for row in self.rows]

    def check(
        self,
        corpora: dict[str, Corpus],
        characters: Iterable[str],
        allow: bool,
        advice: str,
        is_own: bool = True,
    ) -> None:
        """As `alphabet.Characters.check`; what the profile lacks is named with examples."""
        lacking = Outside(characters, self)
        unknown.check_unknown(corpora, lacking, allow, ADD_LINES, is_own, lacking.words)


# --- reading --------------------------------------------------------------------------------------


def choose(path: str | None, saved: list[list[str]] | None = None) -> Profile | None:
    """The profile of --profile, or that of a checkpoint (`saved`: its rows, [] if it has none, None
    without a checkpoint), which the flag must not contradict. Raises `UsageError`."""
    given = read(path) if path else None
    if saved is None:
        return given
    kept = of_rows(saved)
    if given and given != kept:
        raise UsageError("--profile has other units than the checkpoint: leave it out")
    return kept


def of_rows(rows: list[list[str]]) -> Profile | None:
    """The profile of rows that were kept beside weights; None without any. Raises `UsageError`."""
    if not are_rows(rows):
        raise UsageError("the checkpoint's orthography profile is damaged: take another checkpoint")
    return Profile(tuple(map(tuple, rows))) if rows else None


def are_rows(rows) -> bool:
    """Whether a checkpoint's rows are those of a profile; a schema of `records.mismatch`."""
    if mismatch(rows, [[str]], "it") or any(len(row) != 2 for row in rows):
        return False
    return not rows or fault(dict(enumerate(rows))) is None


def read(path: str) -> Profile:
    """The profile in a file. Prints which columns are used. Raises `UsageError`."""
    lines = io.StringIO(files.read_text(path, "--profile"), newline=None)
    rows = {}
    try:
        table = csv.DictReader(lines, dialect="excel-tab", strict=True)
        columns = table.fieldnames or []
        if columns.count(GRAPHEME) != 1 or columns.count(TEXT) > 1:
            raise UsageError(
                f"--profile {path}: it has no column {GRAPHEME}, or one twice; its columns are"
                f" {', '.join(map(repr, columns[:8])) or 'none'}"
            )
        for row in table:
            if None in row or None in row.values():
                raise UsageError(
                    f"--profile {path}:{table.line_num}: it has not as many cells as the header"
                )
            if not row.get(TEXT, NULL).strip():
                raise UsageError(
                    f"--profile {path}:{table.line_num}: {TEXT} is empty: write the unit itself, or"
                    f" {NULL} if it vanishes"
                )
            unit = composed(row[GRAPHEME])
            text = composed(row.get(TEXT, unit))
            rows[table.line_num] = [unit, {NULL: "", SPACE: " "}.get(text, text)]
    except csv.Error as error:
        raise UsageError(
            f'--profile {path}: {error}: a quotation mark is written as """"'
        ) from None
    if found := fault(rows):
        raise UsageError(f"--profile {path}{found}")
    used = [name for name in (GRAPHEME, TEXT) if name in columns]
    others = [name for name in columns if name not in used]
    print(
        f"--profile {path}: columns used: {', '.join(used)}; not used: {', '.join(others) or 'none'}"
    )
    return Profile(tuple(map(tuple, rows.values())))


def fault(rows: dict[int, list[str]]) -> str | None:
    """What is wrong with rows by line, as the end of a message; None if they are a profile."""
    lines: dict[str, int] = {}
    for line, (unit, _) in rows.items():
        reason = ""
        if not unit or unit.split() != [unit]:
            reason = f"{unit!r} is no unit: it is empty or has a space"
        elif normalise(unit) != unit:
            reason = f"{unit!r} has characters that texts never have"
        elif len(decomposed(unit)) > LONGEST:
            reason = f"the unit has more than {LONGEST} characters"
        elif unit in lines:
            reason = f"{unit!r} is also in line {lines[unit]}"
        if reason:
            return f":{line}: {reason}"
        lines[unit] = line
    profile = Profile(tuple(map(tuple, rows.values())))
    if not 0 < len(profile.units) <= MOST:
        return f": it has {len(profile.units)} units that are letters; a profile has 1 to {MOST:,}"
    units = {*profile.units}
    for line, (unit, text) in rows.items():
        if text != " " and not units.issuperset(profile.cut(text)):
            return (
                f":{line}: {unit!r} becomes {text!r}, which is not made of units that become"
                f" themselves: correct the column {TEXT}, or add lines"
            )
    return None


# --- texts and profile ----------------------------------------------------------------------------


class Outside:
    """`lacking` of `check_unknown` for the units of a profile. It keeps a word for each."""

    def __init__(self, characters: Iterable[str], profile: Profile):
        self.known = {*characters}
        self.cut = profile.cut
        self.examples: dict[str, str] = {}

    def __call__(self, text: str) -> list[str]:
        found = [part for part in self.cut(text) if part not in self.known]
        for part in {*found} - self.examples.keys():
            words = (word for word in text.split() if part in self.cut(word))
            self.examples[part] = next(words, text)
        return found

    def words(self, counts: Counter[str]) -> str:
        """`adds` of `check_unknown`: what the lines of a profile would be for."""
        common = counts.most_common(unknown.NAMED)
        named = [f"{unknown.shown(each)} (as in {self.examples[each]})" for each, _ in common]
        return f"lines of the profile for {', '.join(named)}"


# --- a first profile ------------------------------------------------------------------------------


def clusters(text: str, tones_apart: bool = False) -> list[str]:
    """The characters of a text with the marks and modifier letters after them, and both sides of a
    tie as one. With `tones_apart` marks of tone are alone."""
    found: list[str] = []
    is_open = False  # whether the last one can be continued
    for character in decomposed(text):
        category = unicodedata.category(character)
        is_tone = tones_apart and character in TONES
        continues = category[0] == "M" or category == "Lm"
        if character.isspace() or is_tone or not is_open:
            joins = False
        else:
            joins = continues or found[-1][-1] in TIES
        if joins:
            found[-1] += character
        else:
            found.append(character)
        is_open = unicodedata.category(found[-1][0])[0] in "LM" and not is_tone
    return [composed(each) for each in found if not each.isspace()]


def first_profile(texts: Iterable[str], tones_apart: bool = False) -> str:
    """A table of the units of texts, the most frequent first, for a person to edit."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for text in texts:
        for word in normalise(text).split():
            for unit in clusters(word, tones_apart):
                counts[unit] += 1
                examples.setdefault(unit, word)
    content = io.StringIO()
    table = csv.writer(content, dialect="excel-tab", lineterminator="\n")
    table.writerow([GRAPHEME, TEXT, "Count", "Example", "Name"])
    for unit, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
        name = " + ".join(unicodedata.name(each, f"U+{ord(each):04X}") for each in unit)
        table.writerow([unit, unit, count, examples[unit], name])
    return content.getvalue()


def read_texts(path: str, tiers: tuple[str, ...] = (), column: str | None = None) -> list[str]:
    """The texts of a manifest, annotations or lines. Raises `UsageError` and `DataError`."""
    file = files.require_file(Path(path))
    if is_annotations(file):
        found = choose_tiers(file, READERS[file.suffix.lower()](file).tiers, tiers)
        return [each.text for tier in found for each in tier.annotations]
    if file.suffix.lower() in TABLES:
        checks = Checks(text_column=column)
        return [*read_manifest(path, Rejections(), normalise, Segments(False), checks).texts]
    return files.read_text(path).splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m speech.writing.profile",
        description="Writes a first orthography profile of texts, with counts: edit it, then give it"
        " to a recogniser with --profile.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("texts", nargs="+", metavar="FILE", help="manifests, .eaf, .TextGrid, or texts in UTF-8")
    add("--output", required=True, metavar="FILE.tsv", help="the profile, which must not exist")
    add("--tier", nargs="+", default=[], metavar="NAME", help="tiers of annotations with the texts")
    add("--text_column", metavar="NAME", help="the column of a table with the texts")
    add("--tones_apart", action="store_true", help="marks of tone are units beside their vowels")
    args = parser.parse_args()
    output = Path(args.output)
    if output.suffix.lower() != ".tsv" or output.exists():
        raise UsageError(f"--output {output}: name a new file that ends in .tsv")
    texts = [t for path in args.texts for t in read_texts(path, tuple(args.tier), args.text_column)]
    table = first_profile(texts, args.tones_apart)
    files.write_text(output, table)
    print(f"{output}: {table.count(chr(10)) - 1} units of {len(texts):,} texts")


if __name__ == "__main__":
    exit_with_one_line(main)
