"""Text: normalisation for training and for scoring, and the tokenizers."""

import json
import tempfile
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from common.errors import DataError, UsageError, require

MOST_SENTENCES = 1_000_000  # that SentencePiece holds in memory
JOINERS = "\u200c\u200d"  # they shape glyphs, so normalisation keeps them; they are not heard, so scoring does not


def normalise(text: str) -> str:
    """For training: NFC, no control characters or byte-order marks, single spaces. Case, punctuation and every
    combining mark stay."""
    if not text.isprintable():  # a test in C: what has to go is rare
        text = "".join(
            c for c in text if c.isspace() or c in JOINERS or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co")
        )
    return " ".join(unicodedata.normalize("NFC", text).split())


def for_scoring(text: str) -> str:
    """`normalise` without punctuation and joiners. Combining marks stay: without them हांव कोंकणी would become
    ह व क कण."""
    kept = (" " if unicodedata.category(c).startswith("P") else c for c in text if c not in JOINERS)
    return normalise("".join(kept))


class CharTokenizer:
    """One token a character, from a `vocab.json` as the seed project wrote it ({"char2idx": {...}} or the bare
    mapping). Its special tokens (<pad>, <blank> ...) are left out: blank and end belong to the model."""

    kind = "vocab_file"

    def __init__(self, characters: list[str]):
        self.characters = characters
        self.index = {character: i + 1 for i, character in enumerate(characters)}  # 0: unknown
        self.size, self.unknown = len(characters) + 1, 0
        self.spaces = set(self.encode(" ")) - {self.unknown}

    def encode(self, text: str) -> list[int]:
        return [self.index.get(character, 0) for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.characters[token - 1] if token else "\ufffd" for token in tokens)

    def state(self) -> dict:
        return {"kind": self.kind, "characters": self.characters}


class SentencePieceTokenizer:
    """SentencePiece characters or BPE. `model`: the serialized model, which travels in checkpoints as hexadecimal."""

    def __init__(self, model: bytes):
        self.model = model
        self.processor = require("sentencepiece", "the tokenizer").SentencePieceProcessor(model_proto=model)
        self.size = self.processor.vocab_size()
        self.unknown = self.processor.unk_id()
        self.spaces = set(self.encode(" ")) - {self.unknown}

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.processor.decode(tokens)

    def state(self) -> dict:
        return {"kind": "sentencepiece", "model": self.model.hex()}


def unknown_share(tokenizer, tokens: list[int]) -> float:
    """The share of a text's tokens that are unknown, spaces apart; 1 where there is nothing else."""
    written = [token for token in tokens if token not in tokenizer.spaces]
    return written.count(tokenizer.unknown) / len(written) if written else 1.0


def load_vocab_file(path: str) -> CharTokenizer:
    """Reads the seed project's `vocab.json`. Raises `UsageError`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        mapping = content.get("char2idx", content)
        characters = [c for c, _ in sorted(mapping.items(), key=lambda pair: int(pair[1])) if len(c) == 1]
    except OSError as error:
        raise UsageError(f"--vocab_file {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"--vocab_file {path}: not a JSON mapping of characters to numbers ({error})") from None
    if not characters:
        raise UsageError(f"--vocab_file {path}: no single characters in it")
    return CharTokenizer(characters)


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int) -> SentencePieceTokenizer:
    """A SentencePiece model of `texts` (which are gone through twice): `char` takes every character that occurs, `bpe`
    those and pieces of several up to `vocab_size`. Raises `UsageError` where that is too few, `DataError` where the
    texts cannot support a tokenizer."""
    sentencepiece = require("sentencepiece", "the tokenizer")
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    characters.discard(" ")
    if not characters:
        raise DataError("no tokenizer can be trained: there is no text")
    if kind == "bpe" and vocab_size < len(characters) + 2:  # the unknown token and the space
        raise UsageError(
            f"--vocab_size {vocab_size} is too few for the {len(characters)} characters of the training texts: "
            f"it must be at least {len(characters) + 2}"
        )
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "tokenizer")
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_prefix=prefix, model_type=kind,
                vocab_size=vocab_size if kind == "bpe" else 100_000, hard_vocab_limit=False, character_coverage=1.0,
                required_chars="".join(sorted(characters)),  # those of the texts beyond the limit below, too
                unk_id=0, bos_id=-1, eos_id=-1, pad_id=-1, unk_surface="\ufffd", normalization_rule_name="identity",
                remove_extra_whitespaces=False, add_dummy_prefix=kind == "bpe", max_sentence_length=100_000,
                num_threads=1, minloglevel=2, input_sentence_size=MOST_SENTENCES, shuffle_input_sentence=False,
            )  # fmt: skip
        except RuntimeError as error:
            raise DataError(
                f"no tokenizer could be trained on these texts: {str(error).strip().splitlines()[-1]}"
            ) from None
        return SentencePieceTokenizer(Path(prefix + ".model").read_bytes())


def make_tokenizer(state: dict):
    """The tokenizer whose `state()` a checkpoint holds."""
    if state["kind"] == "sentencepiece":
        return SentencePieceTokenizer(bytes.fromhex(state["model"]))
    return CharTokenizer(state["characters"])
