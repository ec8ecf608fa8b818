"""The language model of a recogniser: its training texts, which are kept as texts.txt beside the
weights, and other texts of the language. It is used where it helps on held-out utterances."""

import contextlib
import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import files, options
from common.errors import UsageError
from common.options import flag
from speech.decoding.ngram import Fusion, NGram, Words
from speech.writing import metrics
from speech.writing.text import in_lower_case, normalise

OWN = "the training texts"
MORE = "all texts"  # those of --lm_text, too
TEXTS = "texts.txt"  # beside the weights, a text a line; anybody can add lines
BEST = "best.json"  # beside the weights; it also says whether the language model helps them
HELPS = "language_model"  # a key of it: {"helps", "texts"}, the latter as `digest` returns it
SEVERAL = 3  # spaces of a sentence that is also found inside of a line: four words
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


EXCLUDES = (("lm off", "lm_text", "the second is for the language model; leave one of them out"),)


def add_arguments(parser) -> None:
    options.add_record(parser, "language model", LanguageModelFlags)
    parser.refuse(EXCLUDES)


def resolve(args) -> LanguageModelFlags:
    """The request of the flags, also of a recipe without them. Raises `UsageError`."""
    for path in getattr(args, "lm_text", None) or []:
        lines_of(path)  # what is wrong with it is reported now
    return options.read_record(LanguageModelFlags, args)


@dataclass(frozen=True)
class Tokens:
    """The tokens that a language model counts."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    size: int  # those of a model are below it
    mark: int  # between sentences
    is_space: bool  # the mark is the space between words, too
    unknown: int | None  # the id for what the model lacks; None: left out
    prepare: Callable[[str], str] = normalise  # a text as the model has learned it
    tags: frozenset[int] = frozenset()  # that are no part of a text

    def of(self, text: str) -> list[int]:
        """The tokens of a text that the model has: in lower case, if it lacks capitals."""
        tokens = self.encode(text)
        lower = self.encode(text.lower())
        if self.unknown is None:
            lacks_capitals = len(tokens) < len(lower)
        else:
            lacks_capitals = lower.count(self.unknown) < tokens.count(self.unknown)
        if lacks_capitals:
            tokens = lower
        known = []
        for token in tokens:
            is_second_space = token == self.mark and known[-1:] == [self.mark]
            if token != self.unknown and not is_second_space:
                known.append(token)
        return known


def tokens_of(tokenizer, prepare: Callable[[str], str] = normalise) -> Tokens:
    """Those of a recogniser's tokenizer, as `timed` describes it. The mark is its space or, if it
    has none that stands alone, a token beyond its own."""
    spaces = [i for i in tokenizer.spaces if len(tokenizer.pieces[i]) == 1]
    mark = min(spaces, default=tokenizer.size)
    size = max(tokenizer.size, mark + 1)
    return Tokens(
        tokenizer.encode,
        tokenizer.decode,
        size,
        mark,
        bool(spaces),
        tokenizer.unknown,
        prepare,
        frozenset(filter(tokenizer.is_tag, range(tokenizer.size))),
    )


@dataclass(frozen=True)
class LanguageModel:
    """A language model that is ready to use."""

    # Those that a held-out set chooses from, by the name of their texts, the one with the most
    # texts last; each is made when it is called for the first time, which takes seconds for a book.
    choices: dict[str, Callable[[], Fusion]]
    # token ids that are used in any case, because somebody has asked for them
    names: list[list[int]]
    helps: bool | None  # what is known of a single one (None: nothing yet)
    folder: Path | None  # of the weights, which keeps that of the training texts
    tokens: Tokens

    def used(self) -> Fusion | None:
        """The model in the search without a held-out set; None if it is known not to help."""
        if self.helps is False or not self.choices:
            return self.with_names(None)
        return self.with_names([*self.choices.values()][-1]())

    def judged(self, rows_of: Callable[[Fusion | None], list[dict]], name: str) -> Fusion | None:
        """The model in the search that has the lowest error rates in the set `name`, whose rows
        `rows_of` decodes with a model; None if that is none of them. Prints the rates, and keeps
        the answer."""
        if self.helps is not None or not self.choices:
            return self.used()
        best = None
        cer, wer = shares(rows_of(None))
        without = lowest = cer + wer
        print(f"language model on the {name} set: without it {percent(cer, wer)}")
        for texts, fusion in self.choices.items():
            cer, wer = shares(rows_of(fusion()))
            print(f"  of {texts}: {percent(cer, wer)}")
            if cer + wer < lowest:
                lowest = cer + wer
                best = texts
            if texts == OWN and self.folder:
                keep(self.folder, cer + wer < without)
        print(f"  it is {'off' if best is None else f'that of {best}'}")
        return self.with_names(self.choices[best]() if best else None)

    def with_names(self, fusion: Fusion | None) -> Fusion | None:
        """The model together with the names, which have the methods of a `Fusion`."""
        if not self.names:
            return fusion
        from speech.decoding.names import Names, WithNames

        mark = self.tokens.mark if self.tokens.is_space else None
        return WithNames(Names(self.names, mark), fusion)


def percent(cer: float, wer: float) -> str:
    return f"CER {100 * cer:.1f} %, WER {100 * wer:.1f} %"


def shares(rows: list[dict]) -> tuple[float, float]:
    """CER and WER of decoded rows."""
    scores = metrics.score(rows)
    return tuple(scores[name][0] / max(1, scores[name][1]) for name in ("cer", "wer"))


def make(
    flags: LanguageModelFlags,
    tokens: Tokens | None,
    folder: Path | None,
    held_out: Iterable[str] = (),
) -> LanguageModel | None:
    """The language model that the flags ask for; None if it is off, without any text, or without
    `tokens`, in a search that takes none. `folder`: that of the weights, with the texts of their
    training. Lines that are or have a sentence of the `held_out` sets are left out, except where
    most of them were trained: commands or digits are said again. Raises `UsageError` and
    `DataError`."""
    if tokens is None or flags.lm == "off":
        return None
    own = read_lines(folder / TEXTS, tokens) if folder else []
    more, names = further(flags.lm_text, tokens) if flags.lm_text else ([], [])
    if flags.lm == "on" and not (own or more or names):
        raise UsageError(
            f"--lm on: there is no {TEXTS} beside the weights; give texts with --lm_text"
        )
    if not (own or more or names):
        return None
    known = {in_lower_case(text) for text in held_out}
    own_keys = [in_lower_case(text) for text in own] if known else []
    if 2 * len(known.intersection(own_keys)) > len(known):
        print(
            "language model: most held-out sentences are training texts, too; they are not left out"
        )
        known = set()
    kept_own, kept_more = own, more
    if known:
        said = [f" {each} " for each in known if each.count(" ") >= SEVERAL]
        kept_own = [text for text, key in zip(own, own_keys, strict=True) if key not in known]
        kept_more = [text for text in more if not has_sentence(text, known, said)]
        names = [name for name in names if in_lower_case(name) not in known]
    texts = {OWN: (own, kept_own)}
    if more:
        texts[MORE] = own + more, kept_own + kept_more
    choices = {}
    for name, (lines, every) in texts.items():
        if left_out := len(lines) - len(every):
            print(f"language model of {name}: {left_out} held-out sentences are left out")
        if every:
            choices[name] = functools.cache(functools.partial(fusion_of, part(every), tokens))
    helps = True if flags.lm == "on" else None
    if helps is None and folder and not more:
        helps = kept(folder)
    listed = [tokens.of(name) for name in names]
    return LanguageModel(choices, listed, helps, folder, tokens)


def has_sentence(text: str, known: set[str], said: list[str]) -> bool:
    """Whether a line of a book is one of the sentences `known`, or has one of `said` in it, in
    lower case and without punctuation."""
    key = in_lower_case(text)
    return key in known or any(each in f" {key} " for each in said)


def fusion_of(texts: list[str], tokens: Tokens) -> Fusion:
    """The language model of texts and their words."""
    sentences = [tokens.of(text) for text in texts]
    model = NGram(sentences, tokens.size, tokens.mark)
    words = Words(map(tokens.decode, sentences))
    return Fusion(model, encode=tokens.of, decode=tokens.decode, words=words, tags=tokens.tags)


def further(paths: Iterable[str], tokens: Tokens) -> tuple[list[str], list[str]]:
    """The texts and, of lists of names, the names in --lm_text. Says what the model lacks of them.
    Raises `UsageError`."""
    from speech.decoding.names import are_names
    from speech.writing.changes import Changes

    def as_written(text: str) -> str:
        return tokens.decode(tokens.of(tokens.prepare(text)))

    texts, names = [], []
    for path in paths:
        lines = lines_of(path)
        kind = texts
        if are_names(lines):
            print(f"language model: {path} is a list of {len(lines)} names", file=sys.stderr)
            kind = names
        changes = Changes(as_written)
        for line in lines:
            if changes(line).strip():
                kind.append(tokens.prepare(line))
        if report := changes.report():
            print(f"language model: {path}, {report}", file=sys.stderr)
    return texts, names


def in_search(
    flags: LanguageModelFlags, tokens: Tokens | None, folder: Path | None
) -> Fusion | None:
    """`make` for a search without references. None if it is known not to help. Says so, and that
    of further texts nothing is known."""
    lm = make(flags, tokens, folder)
    if lm is None:
        return None
    if lm.helps is False:
        print(
            "language model: off, because it did not help the held-out set (--lm on uses it)",
            file=sys.stderr,
        )
    elif MORE in lm.choices and flags.lm is None:
        print(
            "language model: whether --lm_text helps is not known without a held-out set"
            " (--evaluate finds it out)",
            file=sys.stderr,
        )
    return lm.used()


def lines_of(path: str) -> list[str]:
    """The lines of a file of --lm_text that have a text. Raises `UsageError`."""
    lines = [line for line in files.read_text(path, "--lm_text").splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"--lm_text {path}: it has no text")
    if lines[0].startswith("{"):
        raise UsageError(f"--lm_text {path}: it is a manifest; give a file with texts alone")
    return lines


def read_lines(path: Path, tokens: Tokens) -> list[str]:
    """The texts in TEXTS, as the model has learned them; none if there is no such file."""
    if not path.is_file():
        return []
    return [line for line in map(tokens.prepare, files.read_text(path).splitlines()) if line]


def part(texts: Sequence[str]) -> list[str]:
    """The texts or, of very many, every second or third one."""
    step = math.ceil(sum(map(len, texts)) / MOST_CHARACTERS) or 1
    return [texts[place] for place in range(0, len(texts), step)]


def as_file(texts: Sequence[str]) -> dict[str, str]:
    """The file of the training texts that a person wrote, for `Task.beside`. Drafts of a model have
    words that the language has not."""
    return {TEXTS: "".join(f"{text}\n" for text in part(texts))}


def kept(folder: Path) -> bool | None:
    """Whether the language model of the texts that are now in a folder is known to help its best
    weights."""
    answer = summary_of(folder).get(HELPS)
    if not isinstance(answer, dict) or answer.get("texts") != digest(folder / TEXTS):
        return None
    return answer.get("helps") is True


def keep(folder: Path, helps: bool) -> None:
    """Notes beside the best weights whether the language model of their texts helps them."""
    if summary := summary_of(folder):
        answer = {"helps": helps, "texts": digest(folder / TEXTS)}
        text = json.dumps({**summary, HELPS: answer}, indent=1)
        with contextlib.suppress(OSError):  # a folder that is only read: it is asked again
            files.write_text(folder / BEST, f"{text}\n")


def digest(path: Path) -> str | None:
    """By which a change of a file is found; None without the file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def summary_of(folder: Path) -> dict:
    """The content of best.json; empty if there is none, or if it is not sound."""
    try:
        return files.read_json(folder / BEST)
    except (OSError, UsageError):
        return {}
