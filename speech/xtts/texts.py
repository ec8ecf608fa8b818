"""What XTTS reads of a text: phonemes or letters, tokens, and a vocabulary with more of them.

Coqui's vocabulary has no Ethiopic letters. Amharic is read as phonemes in Latin letters that it has
(--use_amharic_g2p), or the vocabulary is extended by Ethiopic characters, or by these and pieces of
words (--extend_vocab)."""

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from common import files, options
from common.errors import UsageError
from speech import amharic
from speech.columns import Corpus
from speech.text import normalise
from speech.xtts.vocabulary import (
    MOST_TOKENS,
    Vocabulary,
    add_pieces,
    add_tokens,
    learn_merges,
    new_rows,
)

AMHARIC = "am"
OTHER_NAMES = {
    "amh": "am",
    "amharic": "am",
    "eng": "en",
    "fra": "fr",
    "deu": "de",
    "spa": "es",
    "ara": "ar",
    "ita": "it",
}
# Coqui speaks a language that it does not know as English text that begins with the new token
CARRIER = "en"
KINDS = ("characters", "bpe")  # of --extend_vocab
VOCAB_SIZE = 2000
SEED = 0  # of a language's rows
PHONEMES = "abcdefghijklmnopqrstuvwxyzäəčšžñı'"
# The characters of a model from scratch.
CHARACTERS = "".join(map(chr, range(0x1200, 0x1380))) + "'.,;:?!-" + PHONEMES
ETHIOPIC = re.compile(amharic.ETHIOPIC)
TEXT_ROWS = (
    "text_embedding.weight",
    "text_head.weight",
    "text_head.bias",
)  # of the GPT, a row for each token

# A schema for `checkpoint.mismatch`: metadata["text"], how the model reads.
SCHEMA = {
    "g2p": bool, "epenthesis": bool, "extend_vocab?": {*KINDS}, "vocab_size?": int,
    "lexicon": lambda words: all(type(word) is str is type(sound) for word, sound in words.items()),
}  # fmt: skip
_LATER = "the vocabulary of a trained model is not extended; leave it out"
EXCLUDES = (
    ("extend_vocab", "use_amharic_g2p", "phonemes need no new tokens; give one of them"),
    *(
        (flag, goal, _LATER)
        for flag in ("extend_vocab", "vocab_size")
        for goal in ("synthesize", "evaluate", "show_text")
    ),
    *(("show_text", goal, "give one of them") for goal in ("synthesize", "evaluate", "export")),
)
NEEDS = (
    ("lexicon", ("use_amharic_g2p",), ""),
    ("epenthesis", ("use_amharic_g2p",), ""),
    ("epenthesis False", ("use_amharic_g2p",), ""),
    ("vocab_size", ("extend_vocab bpe",), ""),
)


@dataclass(frozen=True)
class TextOptions:
    """How a new model reads, as the flags ask. `extend_vocab` is None or one of `KINDS`."""

    g2p: bool = False
    epenthesis: bool = True
    lexicon: dict[str, str] = field(default_factory=dict)
    extend_vocab: str | None = None
    vocab_size: int = VOCAB_SIZE

    def metadata(self) -> dict:
        """The new model's metadata["text"]."""
        return {"g2p": self.g2p, "epenthesis": self.epenthesis, "lexicon": self.lexicon}


def add_arguments(parser) -> None:
    group = parser.add_argument_group("text (of a new model; a checkpoint keeps how it reads)")
    group.add_argument(
        "--use_amharic_g2p",
        action=options.OnOff,
        help=(
            "read Amharic as phonemes in Latin letters, which the released vocabulary has (off: as"
            " it is written, with numbers in words)"
        ),
    )
    group.add_argument(
        "--lexicon",
        type=options.path,
        metavar="FILE",
        help=(
            "with --use_amharic_g2p: pronunciations of words, above all their long consonants,"
            " which are not written"
        ),
    )
    group.add_argument(
        "--epenthesis",
        action=options.OnOff,
        default=True,
        help="with --use_amharic_g2p: write the vowel ı that breaks up clusters of consonants (on)",
    )
    group.add_argument(
        "--extend_vocab",
        choices=KINDS,
        help=(
            "add to the vocabulary the characters of the training texts that it lacks; bpe: also"
            " pieces of Ethiopic words"
        ),
    )
    group.add_argument(
        "--vocab_size",
        type=options.number(int, 1, MOST_TOKENS),
        default=VOCAB_SIZE,
        metavar="N",
        help=f"with --extend_vocab bpe: tokens to add at most ({VOCAB_SIZE})",
    )
    group.add_argument(
        "--show_text",
        nargs="+",
        metavar="TEXT",
        help="print what the model reads of texts, or of a file with a text in each line, and exit",
    )


def resolve(args, language: str) -> TextOptions:
    """Checks these flags and returns what they ask for. Raises `UsageError`."""
    given = [flag for flag in ("use_amharic_g2p", "lexicon", "epenthesis") if flag in args.given]
    if given and args.synthesize and (args.resume or not args.model_dir):
        raise UsageError(
            f"--{given[0]}: a checkpoint keeps how it reads; leave it out, or give --model_dir"
            " without --resume"
        )
    if args.use_amharic_g2p and language != AMHARIC:
        raise UsageError(
            f"--use_amharic_g2p is for Amharic ({AMHARIC}), and --language is {language}: leave one"
            " of them out"
        )
    return TextOptions(
        g2p=bool(args.use_amharic_g2p),
        epenthesis=args.epenthesis,
        lexicon=amharic.read_lexicon(args.lexicon) if args.lexicon else {},
        extend_vocab=args.extend_vocab,
        vocab_size=args.vocab_size,
    )


def conflicts(given: frozenset[str], wanted: TextOptions, metadata: dict) -> list[str]:
    """The flags on the command line that contradict how a checkpoint's model reads, each with the
    reason."""
    saved = metadata.get("text", TextOptions().metadata())
    kind, size = saved.get("extend_vocab"), saved.get("vocab_size")
    reads = "phonemes" if saved["g2p"] else "text as written"
    extended = f"was extended by {kind}, {size} at most" if kind else "was not extended"
    signs = ["" if on else "no_" for on in (wanted.g2p, wanted.epenthesis)]
    checks = (
        (
            "use_amharic_g2p",
            wanted.g2p != saved["g2p"],
            f"--{signs[0]}use_amharic_g2p (the checkpoint reads {reads})",
        ),
        (
            "lexicon",
            wanted.lexicon != saved["lexicon"],
            "--lexicon (the checkpoint has other words)",
        ),
        (
            "epenthesis",
            wanted.epenthesis != saved["epenthesis"],
            f"--{signs[1]}epenthesis (the checkpoint has the opposite)",
        ),
        (
            "extend_vocab",
            wanted.extend_vocab != kind,
            f"--extend_vocab {wanted.extend_vocab} (the checkpoint's vocabulary {extended})",
        ),
        (
            "vocab_size",
            wanted.vocab_size != size,
            f"--vocab_size {wanted.vocab_size} (the checkpoint's vocabulary {extended})",
        ),
    )
    return [message for flag, differs, message in checks if flag in given and differs]


def texts_of(wanted: list[str], flag: str = "--synthesize") -> list[str]:
    """The texts of a flag: a name of a file stands for its lines. Raises `UsageError`."""
    if (
        len(wanted) == 1
        and re.fullmatch(r"\S+\.(txt|csv|tsv|json)", wanted[0])
        and not os.path.isfile(wanted[0])
    ):
        raise UsageError(f"{flag} {wanted[0]}: no such file")
    lines = (
        files.read_text(wanted[0]).splitlines()
        if len(wanted) == 1 and os.path.isfile(wanted[0])
        else wanted
    )
    texts = list(filter(None, map(normalise, lines)))
    if not texts:
        raise UsageError(f"{flag}: there is no text")
    return texts


# --- reading --------------------------------------------------------------------------------------


class FrontEnd:
    """Texts of the model's language to what the model reads. Amharic becomes phonemes, or is
    written without numerals and abbreviations. Other languages are left as they are. `text`:
    metadata["text"]."""

    def __init__(self, language: str, text: dict):
        self.language = language
        self.text = text

    def read(self, text: str, language: str | None = None) -> str:
        if self.language != AMHARIC or language not in (None, "", AMHARIC):
            return text
        if self.text["g2p"]:
            return amharic.phonemes(text, self.text["lexicon"], self.text["epenthesis"])
        if ETHIOPIC.search(text) or (re.search(r"\d", text) and not any(map(str.isalpha, text))):
            return amharic.spoken(text)
        return text

    def fault(self, text: str, language: str | None, longest: float) -> None:
        """None: without a vocabulary every text can be read."""


class Texts:
    """Texts to tokens: a known language has its prefix, another one its own after English's.
    `is_new`: the vocabulary may still be extended, which error messages advise then."""

    def __init__(self, metadata: dict, is_new: bool = False):
        self.vocabulary = Vocabulary(metadata["vocab"])
        self.language = metadata["language"]
        self.unknown = self.vocabulary.unknown
        self.is_carried = metadata["carried"]
        self.is_new = is_new
        self.front_end = FrontEnd(self.language, metadata.get("text") or TextOptions().metadata())
        # When XTTS speaks, the codes follow STOP. In the training of the released model they do not
        # attend to it, and a model from scratch that is trained so adds a syllable at the end,
        # because it has never seen STOP.
        self.ending = [self.vocabulary.stop] if metadata.get("reads_stop") else []

    def language_of(self, language: str | None) -> str:
        """The language that a row is read in: its own, or the model's if the vocabulary lacks that
        or none is given."""
        return self._known(language) or self.language

    def _known(self, language: str | None) -> str | None:
        """The vocabulary's code of a language that may have another case, a region (en-US) or three
        letters (eng)."""
        code = (language or "").lower().replace("_", "-")
        codes = (
            code,
            OTHER_NAMES.get(code, code),
            OTHER_NAMES.get(code.split("-")[0], code.split("-")[0]),
        )
        return next((each for each in codes if each in self.vocabulary.languages), None)

    def languages_of(self, corpus: Corpus) -> list[str]:
        """The languages that the rows of a corpus are read in, sorted."""
        return sorted({self.language_of(language) for language in corpus.languages})

    def tokens_of(self, corpus: Corpus) -> list[list[int]]:
        """The tokens of each row, as they are trained on. Warns of rows with characters, or a
        language, that the vocabulary lacks."""
        tokens = [
            self.encode(*pair) + self.ending
            for pair in zip(corpus.texts, corpus.languages, strict=True)
        ]
        if unknown := sum(self.unknown in row for row in tokens):
            print(
                f"warning: {unknown} texts have characters that the vocabulary lacks: see"
                " --show_text"
            )
        if foreign := [row for row in corpus.languages if row and not self._known(row)]:
            reason = f"a language that the vocabulary lacks, such as {foreign[0][:20]!r}"
            print(f"warning: {len(foreign)} rows have {reason}: they are read as {self.language}")
        return tokens

    def read(self, text: str, language: str | None = None) -> str:
        """What the model reads of a text. A `language` that the vocabulary lacks is the model's."""
        return self.front_end.read(text) if self.language_of(language) == self.language else text

    def encode(self, text: str, language: str | None = None) -> list[int]:
        """The tokens of what the model reads of a text, after those of the language."""
        return self._encode_read(self.read(text, language), language)

    def fault(self, text: str, language: str | None, longest: float) -> tuple[str, str] | None:
        """Why the model cannot read a text, as (reason, details): it knows none of its letters, or
        the text has more than `longest` tokens. None if it can."""
        tokens = self.encode(text, language)[len(self._encode_read("", language)) :]
        written = self.vocabulary.decode([token for token in tokens if token != self.unknown])
        if not any(character.isalnum() for character in written):
            advice = (
                ": --use_amharic_g2p or --extend_vocab"
                if self.is_new and ETHIOPIC.search(text)
                else ""
            )
            return f"the vocabulary has none of the text's letters{advice}", repr(text[:40])
        if len(tokens) > longest:
            return f"text is longer than {longest} tokens", f"{len(tokens)} tokens"
        return None

    def check(self, text: str) -> str:
        """The text of --synthesize, as it is. Raises `UsageError` if the model cannot read it, and
        warns of characters that the vocabulary lacks."""
        if fault := self.fault(text, None, math.inf):
            raise UsageError(f"--synthesize: {': '.join(fault)}")
        self.warn(text)
        return text

    def warn(self, text: str) -> None:
        """Prints on stderr which characters of a text the model cannot read."""
        if lacking := self.vocabulary.lacking(self.read(text)):
            print(
                f"warning: {text[:40]!r}: the vocabulary lacks {' '.join(lacking[:20])}",
                file=sys.stderr,
            )

    def _encode_read(self, text: str, language: str | None) -> list[int]:
        language = self.language_of(language)
        if self.is_carried and language == self.language:
            return self.vocabulary.encode(f"[{language}]{text}", CARRIER)
        return self.vocabulary.encode(text, language)


def reader_of(
    metadata: dict, wanted: TextOptions, train: Corpus | None, is_new: bool
) -> FrontEnd | Texts:
    """What reads texts as a model with these metadata does, whose vocabulary is extended as
    `wanted` if there is a training set; without a vocabulary if the metadata have none."""
    if "vocab" not in metadata:
        return FrontEnd(metadata["language"], metadata["text"])
    if train and is_new:
        extend(metadata, None, train.texts, wanted)
    return Texts(metadata, is_new)


def show(wanted: list[str], reader: FrontEnd | Texts, longest: int) -> None:
    """--show_text: prints what `reader` makes of each text, one line each. With a vocabulary, warns
    on stderr of characters that it lacks and of texts with more than `longest` tokens, which are
    not trained on."""
    for text in texts_of(wanted, "--show_text"):
        print(reader.read(text))
        if isinstance(reader, Texts):
            reader.warn(text)
            count = len(reader.encode(text)) - len(reader.encode(""))
            if count > longest:
                print(
                    f"warning: {text[:40]!r}: {count} tokens; training takes {longest} at most",
                    file=sys.stderr,
                )


# --- a larger vocabulary --------------------------------------------------------------------------


def add_language(metadata: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Gives a language that the vocabulary lacks a token, and the text embedding and head a row,
    like those that are there."""
    vocabulary = Vocabulary(metadata["vocab"])
    known, listed = (
        metadata["language"] in vocabulary.languages,
        metadata["settings"].get("languages"),
    )
    metadata["carried"] = not known or (
        isinstance(listed, list) and metadata["language"] not in listed
    )
    # an export has the token, and its config.json the languages that Coqui speaks by their names
    if known:
        return
    metadata["vocab"] = add_tokens(metadata["vocab"], [f"[{metadata['language']}]"])
    _add_rows(metadata, tensors, SEED)
    print(
        f"language {metadata['language']}: a new token; Coqui speaks it as language {CARRIER!r}"
        f" with texts that begin with [{metadata['language']}]"
    )


def extend(
    metadata: dict,
    tensors: dict[str, torch.Tensor] | None,
    texts: Iterable[str],
    wanted: TextOptions,
) -> int:
    """Extends a new model's vocabulary in place, as `wanted`, by the characters of the training
    `texts` that it lacks and by pieces of Ethiopic words. `tensors` are the GPT's, None for random
    weights. Texts without the new characters keep their tokens. Returns the number of new tokens.
    Raises `UsageError`."""
    kind, size = wanted.extend_vocab, wanted.vocab_size
    if not kind:
        return 0
    words, count = _count_words(Texts(metadata), texts)
    characters, merges = (
        sorted(Vocabulary(metadata["vocab"]).lacking(" ".join(sorted(set().union(*words))))),
        [],
    )
    if kind == "bpe":
        if len(characters) > size:
            raise UsageError(
                f"--vocab_size {size} is too few for the {len(characters)} characters that are new:"
                " raise it"
            )
        merges = learn_merges(_ethiopic(words), size - len(characters))
    before = metadata["config"]["text_tokens"]
    metadata["vocab"] = add_pieces(metadata["vocab"], characters, merges)
    metadata["text"] = {
        **metadata.get("text", TextOptions().metadata()),
        "extend_vocab": kind,
        "vocab_size": size,
    }
    _add_rows(
        metadata, tensors, before
    )  # the seed differs between extensions, so that their rows do
    after = metadata["config"]["text_tokens"]
    if after == before:
        print(f"vocabulary: no new tokens ({kind}): it has those of the training texts")
        return 0
    if tensors is not None:
        # The training texts consist mostly of new tokens. With biases like the old ones, the head
        # would give each of them the probability of an average token, and the first text loss would
        # be above ln(V), a uniform guess. With these biases it begins at their frequencies. The old
        # tokens together keep the rest of the probability.
        bias, shares = tensors["text_head.bias"], _shares(Texts(metadata), words, count)
        bias[before:] = bias[:before].logsumexp(0) + (
            shares[before:] / shares[:before].sum()
        ).log().to(bias)
    print(f"vocabulary: {after - before} new tokens ({kind}), {after} in all")
    return after - before


@torch.no_grad()
def fit_new_tokens(
    model, count: int, losses: Callable[[], object], reduce: Callable[[list], list]
) -> None:
    """Shifts the biases of the `count` new tokens of a GPT's text head by how much the old logits
    exceed the old biases, which `losses()`, a forward pass, shows: the probability of the new
    tokens stays what their biases ask for. `reduce` adds up numbers over the ranks, whose
    `losses()` are those of different rows."""
    if not count or model.text_head.bias.is_meta:  # a planned run's model has no values
        return
    levels = [torch.zeros(0, dtype=torch.double)]
    hook = model.text_head.register_forward_hook(
        lambda head, inputs, logits: levels.append(logits[:, :-count].double().logsumexp(1).cpu())
    )
    try:
        model.eval()
        losses()
    finally:
        hook.remove()
    found, bias = torch.cat(levels), model.text_head.bias
    total, number = reduce([float(found.sum()), float(len(found))])
    bias[-count:] += total / max(1.0, number) - float(bias[:-count].double().cpu().logsumexp(0))


def _count_words(reader: Texts, texts: Iterable[str]) -> tuple[Counter[str], int]:
    """The frequencies of the words, and of the spaces between them, in what the model reads, and
    the number of texts."""
    words, count = Counter(), 0
    for text in texts:
        parts = reader.read(text).split(" ")
        words.update(parts)
        words[" "] += len(parts) - 1
        count += 1
    return words, count


def _ethiopic(words: Counter[str]) -> Counter[str]:
    """The frequencies of the runs of Ethiopic letters in words. Merges of these change no text
    without such letters."""
    runs = Counter()
    for word, count in words.items():
        for run in amharic.WORD.findall(word):
            runs[run] += count
    return runs


def _shares(reader: Texts, words: Counter[str], count: int) -> torch.Tensor:
    """The share (V,) of each token among all tokens of `count` texts with these words, prefixes and
    STOP included. Each token counts once more than it occurs, so that none is 0."""
    vocabulary, prefix = reader.vocabulary, reader.encode("")
    tally = [1] * vocabulary.size
    for word, number in words.items():
        for token in vocabulary.encode(word, reader.language)[1:]:
            tally[token] += number
    for token in (*prefix, vocabulary.stop):
        tally[token] += count
    return torch.tensor(tally, dtype=torch.float64) / sum(tally)


def _add_rows(metadata: dict, tensors: dict[str, torch.Tensor] | None, seed: int) -> None:
    """Gives the text embedding and head the rows that the vocabulary in `metadata` has more than
    its configuration."""
    config = metadata["config"]
    count = Vocabulary(metadata["vocab"]).size - config["text_tokens"]
    generator = torch.Generator().manual_seed(seed)
    for name in TEXT_ROWS if tensors is not None else ():
        tensors[name] = torch.cat([tensors[name], new_rows(tensors[name], count, generator)])
    metadata["config"] = {**config, "text_tokens": config["text_tokens"] + count}
