"""The language model of a recogniser: its training texts, which are kept as texts.txt beside the
weights, and other texts of the language. It is used where it helps on held-out utterances."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import files, options
from common.errors import DataError, UsageError
from common.options import flag
from speech.decoding.ngram import Fusion, NGram
from speech.writing import metrics
from speech.writing.text import normalise

TEXTS = "texts.txt"  # beside the weights, a text a line; anybody can add lines
BEST = "best.json"  # beside the weights; it also says whether the language model helps them
HELPS = "language_model_helps"  # a key of it
MOST_CHARACTERS = 10_000_000  # of all texts: an n-gram of them takes 1.6 GB while it is counted


@dataclass(frozen=True)
class LanguageModelFlags:
    """Flags of the language model."""

    # fmt: off
    lm: str | None = flag(
        ("on", "off"), None, None,
        "decode with a language model of the training texts, which are kept in texts.txt beside the"
        " weights (on where it helps on the held-out set)")
    lm_text: list[str] | None = flag(
        options.path, None, "FILE",
        "further texts for the language model, plain text in UTF-8: a book, scripts, a list of"
        " names", nargs="+")
    # fmt: on


EXCLUDES = (("lm off", "lm_text", "the second is for the language model; leave one of them out"),)


def add_arguments(parser) -> None:
    options.add_record(parser, "language model", LanguageModelFlags)
    parser.refuse(EXCLUDES)


def resolve(args) -> LanguageModelFlags:
    """The request of the flags, also of a recipe without them. Raises `UsageError`."""
    for path in getattr(args, "lm_text", None) or []:
        files.require_file(Path(path), "--lm_text")
    return options.read_record(LanguageModelFlags, args)


@dataclass(frozen=True)
class LanguageModel:
    """A language model that is ready to use. `helps`: what is known of it (None: nothing yet),
    which the `folder` of the weights keeps, if there is one."""

    fusion: Fusion
    helps: bool | None
    folder: Path | None

    def used(self) -> Fusion | None:
        """The model in the search, None where it is known not to help."""
        return None if self.helps is False else self.fusion

    def judged(self, rows_of: Callable[[Fusion | None], list[dict]], name: str) -> Fusion | None:
        """The model in the search if it lowers the error rates of the set `name`, whose rows
        `rows_of` decodes with it and without it. Prints both, and keeps the answer beside the
        weights."""
        if self.helps is not None:
            return self.used()
        without, with_it = (shares(rows_of(fusion)) for fusion in (None, self.fusion))
        helps = sum(with_it) < sum(without)
        print(
            f"language model on the {name} set: CER {100 * with_it[0]:.1f} %, WER"
            f" {100 * with_it[1]:.1f} %; without it {100 * without[0]:.1f} and"
            f" {100 * without[1]:.1f} %: it is {'on' if helps else 'off'}"
        )
        if self.folder:
            keep(self.folder, helps)
        return self.fusion if helps else None


def shares(rows: list[dict]) -> tuple[float, float]:
    """CER and WER of decoded rows."""
    scores = metrics.score(rows)
    return tuple(scores[name][0] / max(1, scores[name][1]) for name in ("cer", "wer"))


@dataclass(frozen=True)
class Tokens:
    """The tokens that a language model counts: those of a model, below `size`, and a `mark` between
    sentences. `encode`: a text to tokens, without those that the model lacks."""

    encode: Callable[[str], list[int]]
    size: int
    mark: int


def tokens_of(tokenizer) -> Tokens:
    """Those of a recogniser's tokenizer, as `timed` describes it. The mark is its space or, if it
    has none that stands alone, a token beyond its own."""
    spaces = [i for i in tokenizer.spaces if len(tokenizer.pieces[i]) == 1]
    mark = min(spaces, default=tokenizer.size)
    unknown = tokenizer.unknown

    def encode(text: str) -> list[int]:
        return [token for token in tokenizer.encode(text) if token != unknown]

    return Tokens(encode, max(tokenizer.size, mark + 1), mark)


def make(
    flags: LanguageModelFlags,
    tokens: Tokens | None,
    folder: Path | None,
    held_out: Iterable[str] = (),
) -> LanguageModel | None:
    """The language model that the flags ask for; None if it is off, without any text, or without
    `tokens`, in a search that takes none. `folder`: that of the weights, with the texts of their
    training. Sentences of the `held_out` sets are left out. Raises `UsageError` and `DataError`."""
    if tokens is None or flags.lm == "off":
        return None
    texts = read_lines(folder / TEXTS) if folder else []
    more = [line for path in flags.lm_text or [] for line in read_lines(Path(path))]
    if not texts and not more:
        if flags.lm == "on":
            raise UsageError(
                f"--lm on: there is no {TEXTS} beside the weights; give texts with --lm_text"
            )
        return None
    known = {normalise(text) for text in held_out}
    every = [text for text in (*texts, *more) if text not in known]
    if left_out := len(texts) + len(more) - len(every):
        print(f"language model: {left_out} sentences of held-out sets are left out of its texts")
    if sum(map(len, every)) > MOST_CHARACTERS:
        raise DataError(
            f"--lm_text: the texts have more than {MOST_CHARACTERS:,} characters; give a part of"
            " them"
        )
    helps = True if flags.lm == "on" else None
    if helps is None and folder and not more:
        helps = kept(folder)
    model = NGram(map(tokens.encode, every), tokens.size, tokens.mark)
    return LanguageModel(Fusion(model), helps, None if more else folder)


def in_search(
    flags: LanguageModelFlags, tokens: Tokens | None, folder: Path | None
) -> Fusion | None:
    """The language model of a search without references; parameters and errors as in `make`. None
    if it is known not to help."""
    lm = make(flags, tokens, folder)
    return lm and lm.used()


def read_lines(path: Path) -> list[str]:
    """The texts of a file, as training reads them; none if there is no such file."""
    if not path.is_file():
        return []
    return [line for line in map(normalise, files.read_text(path).splitlines()) if line]


def as_file(texts: Sequence[str]) -> dict[str, str]:
    """The file of the training texts, for `Task.beside`; of very many every second, third and so
    on."""
    step = math.ceil(sum(map(len, texts)) / MOST_CHARACTERS) or 1
    return {TEXTS: "".join(f"{texts[place]}\n" for place in range(0, len(texts), step))}


def kept(folder: Path) -> bool | None:
    """Whether the language model is known to help the best weights in a folder."""
    answer = summary_of(folder).get(HELPS)
    return answer if isinstance(answer, bool) else None


def keep(folder: Path, helps: bool) -> None:
    """Notes beside the best weights whether the language model helps them."""
    if summary := summary_of(folder):
        text = json.dumps({**summary, HELPS: helps}, indent=1)
        files.write_text(folder / BEST, f"{text}\n")


def summary_of(folder: Path) -> dict:
    """The content of best.json; empty if there is none, or if it is not sound."""
    try:
        return files.read_json(folder / BEST)
    except (OSError, UsageError):
        return {}
