"""What a letter is: each character of the texts or, with --profile, what an orthography profile
says (profile.py, which comes in with the flag)."""

from collections.abc import Iterable
from dataclasses import dataclass

from common import options
from common.options import flag
from speech.data.columns import Corpus
from speech.writing import text, unknown


@dataclass(frozen=True)
class ProfileFlags:
    """The flag of a recogniser that makes its own vocabulary."""

    # fmt: off
    profile: str | None = flag(
        options.path, None, "FILE",
        "orthography profile, a .tsv with a column Grapheme: what the letters of the language are"
        " (python -m speech.writing.profile writes a first one)")


class Characters:
    """Each character is a letter. `profile.Profile` has the same methods."""

    rows = ()

    def kept(self) -> list[list[str]]:
        """What a `ModelInfo` keeps of a profile."""
        return []

    def prepare(self, transcript: str) -> str:
        """A text as it is learned."""
        return text.normalise(transcript)

    def cut(self, transcript: str) -> list[str]:
        """The letters of a text, and its spaces."""
        return list(transcript)

    def joined(self, letters: Iterable[str]) -> str:
        """The text of letters."""
        return "".join(letters)

    def vocabulary(self, texts: Iterable[str]) -> list[str]:
        """The letters of a new model, the most frequent ones of its training texts first."""
        return text.characters_of(texts)

    def check(
        self,
        corpora: dict[str, Corpus],
        characters: Iterable[str],
        allow: bool,
        advice: str,
        is_own: bool = True,
    ) -> None:
        """`unknown.check_unknown` for a model of these `characters`. Raises `DataError`."""
        unknown.check_unknown(corpora, unknown.outside(characters), allow, advice, is_own)


def add_arguments(parser, group="text") -> None:
    options.add_record(parser, group, ProfileFlags)


def choose(path: str | None, kept: list[list[str]] | None = None):
    """The letters of --profile or of a checkpoint (`kept`). Raises `UsageError` if they differ."""
    if not path and not kept:
        return Characters()
    from speech.writing import profile

    return profile.choose(path, kept) or Characters()
