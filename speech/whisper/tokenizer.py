"""Whisper's tokenizer: byte-level BPE and its special tokens; reading, training, and writing for `transformers`."""

import base64
import difflib
import itertools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from common.errors import DataError, UsageError, require

# In the order of the released vocabularies; yue came with large-v3.
LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml "
    "cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am "
    "yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
).split()
RELATED = {"kok": ("mr", "hi", "kn"), "gom": ("mr", "hi", "kn"), "bho": ("hi", "ne"), "or": ("bn", "hi")}
TASKS = ("translate", "transcribe")
END, START = "<|endoftext|>", "<|startoftranscript|>"
NO_TIMESTAMPS = "<|notimestamps|>"
NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")  # OpenAI's name, and that of older Hugging Face folders
AFTER_LANGUAGES = (*(f"<|{t}|>" for t in TASKS), "<|startoflm|>", "<|startofprev|>", NO_SPEECH[0], NO_TIMESTAMPS)
TIMESTAMPS = [f"<|{i * 0.02:.2f}|>" for i in range(1501)]
ENGLISH_ONLY_SIZE = 51_864
_TIMESTAMPS = frozenset(TIMESTAMPS)
ENGLISH_ONLY_END = 50_256  # where GPT-2's own vocabulary, that of the English-only models, has its end
LIBRARY = "Whisper's tokenizer"


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes: itself where it prints, else one from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte if byte in prints else 0x100 + others.index(byte)) for byte in range(256)]


BYTES = _byte_characters()
BYTE_OF = {character: byte for byte, character in enumerate(BYTES)}


def _stand_in(raw: bytes) -> str:
    return "".join(BYTES[byte] for byte in raw)


def _raw(token: str) -> bytes:
    """The bytes that a token of the vocabulary stands for; one that is no stand-in is text as it is."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "replace")


def _byte_level(tokenizers, vocab: dict[str, int], merges: list[tuple[str, str]]):
    try:
        model = tokenizers.models.BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix="")
    except Exception as error:  # the library has no type of its own
        raise ValueError(str(error)) from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _library():
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and forked data workers do not go together
    return require("tokenizers", LIBRARY)


class WhisperTokenizer:
    """Byte-level BPE with Whisper's special tokens.

    `vocab`: text tokens (byte stand-ins) to ids. `merges`: pairs, first ones first. `specials`: special tokens and
    timestamps to ids. `symbols`: text tokens that are looked for before anything is split, such as `<SK>`; they are in
    `vocab`. `spelling`: a `normalizer.json`'s content, only kept. Members: `size`, `end`, `start`, `no_timestamps`,
    `no_speech`, `timestamp_begin` (ids; None where there is none), `prompt` (what the decoder starts with),
    `languages` (codes that `with_language` takes)."""

    kind = "whisper"

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]], specials: dict[str, int],
                 symbols: Iterable[str] = (), language: str | None = None, task: str = "transcribe",
                 multilingual: bool = True, spelling: dict | None = None):  # fmt: skip
        tokenizers = _library()
        self.vocab, self.merges, self.specials = vocab, merges, specials
        self.symbols, self.multilingual, self.spelling = list(symbols), multilingual, spelling
        self.size = 1 + max(*vocab.values(), *specials.values())
        self.end, self.start = specials[END], specials[START]
        self.no_timestamps = specials.get(NO_TIMESTAMPS)
        self.no_speech = next((specials[name] for name in NO_SPEECH if name in specials), None)
        self.timestamp_begin = specials.get(TIMESTAMPS[0])
        last = specials.get("<|translate|>", 0)
        self.languages = [
            name[2:-2] for name, i in sorted(specials.items(), key=lambda s: s[1]) if self.start < i < last
        ]
        self.raw = {i: _raw(token) for token, i in vocab.items()}
        self.bpe = _byte_level(tokenizers, vocab, merges)
        # No special token is known here, so that a transcript cannot spell one.
        self.bpe.add_tokens([tokenizers.AddedToken(symbol, normalized=False) for symbol in self.symbols])
        if task not in TASKS:
            raise UsageError(f"task {task}: Whisper knows {' and '.join(TASKS)}")
        self.language, self.task = self._checked(language), task
        asked = (
            [self.start, specials[f"<|{self.language}|>"], specials[f"<|{task}|>"]] if multilingual else [self.start]
        )
        self.prompt = asked + ([] if self.no_timestamps is None else [self.no_timestamps])

    def _checked(self, code: str | None) -> str:
        if not self.multilingual:
            if code not in (None, "en"):
                raise UsageError(f"language {code}: this is an English-only model; take a multilingual one")
            return "en"
        if code is None and len(self.languages) == 1:
            return self.languages[0]
        if code in self.languages:
            return code
        if code is None:
            raise UsageError(f"the language is not given; Whisper knows {' '.join(self.languages)}")
        near = [c for c in RELATED.get(code, ()) if c in self.languages]
        near = near or difflib.get_close_matches(code, self.languages, 5, 0.5) or self.languages
        raise UsageError(
            f"language {code}: Whisper has no token for it; take a near one's, fine-tuning does the rest: {' '.join(near)}"
        )

    def with_language(self, code: str, task: str | None = None) -> "WhisperTokenizer":
        """The same vocabulary with another `prompt`. Raises `UsageError` where the vocabulary lacks the language."""
        return make({**self.state(), "language": code, "task": task or self.task})

    def encode(self, text: str) -> list[int]:
        """Tokens of `text` without special ones, even where it spells one. With `train_symbols`' vocabulary the text has to
        consist of its symbols: as in `transformers`, bytes that no token stands for are left out."""
        return self.bpe.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, without special ones and ids beyond the vocabulary; U+FFFD for incomplete UTF-8."""
        return b"".join(self.raw.get(int(token), b"") for token in tokens).decode("utf-8", "replace")

    def state(self) -> dict:
        """What `make` needs: dicts, lists and strings, for a checkpoint."""
        return {
            "kind": self.kind, "vocab": self.vocab, "merges": [" ".join(pair) for pair in self.merges],
            "specials": self.specials, "symbols": self.symbols, "language": self.language, "task": self.task,
            "multilingual": self.multilingual, "spelling": self.spelling,
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        """Writes the files that `transformers` reads (WhisperTokenizer, AutoTokenizer, WhisperProcessor) into `folder`:
        the same ids and the same decoding there. Its class builds the tokenizer again from vocabulary, merges and added
        tokens, so nothing else may carry meaning."""
        tokenizers = _library()
        ordered = sorted(self.specials.items(), key=lambda pair: pair[1])
        follows = [i for _, i in ordered] == list(range(len(self.vocab), len(self.vocab) + len(ordered)))
        vocab = (
            self.vocab if follows else {**self.vocab, **self.specials}
        )  # added tokens are numbered on, or found there
        whole = _byte_level(tokenizers, vocab, self.merges)
        named = [name for name, _ in ordered if name not in _TIMESTAMPS]
        added = [(i, self.vocab[name], name) for i, name in enumerate(self.symbols)]
        added = [(name, i, False) for _, i, name in added] + [(name, i, name not in _TIMESTAMPS) for name, i in ordered]
        # Timestamps are not special: so they stay when special tokens are skipped. Many at a time: each call is slow.
        for special, group in itertools.groupby(added, key=lambda entry: entry[2]):
            some = [tokenizers.AddedToken(name, normalized=False, special=special) for name, _, _ in group]
            (whole.add_special_tokens if special else whole.add_tokens)(some)
        prompt = [next(name for name, i in ordered if i == token) for token in self.prompt]
        whole.post_processor = tokenizers.processors.TemplateProcessing(
            single=[*prompt, "$A:0", END], pair=[*prompt, "$A:0", "$B:1", END],
            special_tokens=[(name, self.specials[name]) for name in (*prompt, END)],
        )  # fmt: skip
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        special = {**dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END),
                   "additional_special_tokens": named}  # fmt: skip
        # `transformers` finds a language by counting from <|startoftranscript|> along OpenAI's list.
        counted = self.multilingual and self.language in LANGUAGES
        counted = counted and self.prompt[1] == self.start + 1 + LANGUAGES.index(self.language)
        config = {
            "tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor", **special,
            "add_prefix_space": False, "clean_up_tokenization_spaces": False, "errors": "replace",
            "model_max_length": 1_000_000_000, "language": self.language if counted else None,
            "task": self.task if counted else None, "predict_timestamps": False,
            "added_tokens_decoder": {
                str(i): {"content": name, **flags, "special": special} for name, i, special in sorted(added, key=lambda a: a[1])
            },
        }  # fmt: skip
        files = {
            "tokenizer.json": json.loads(whole.to_str()), "tokenizer_config.json": config, "vocab.json": vocab,
            "special_tokens_map.json": special,
            "added_tokens.json": {name: i for name, i, _ in added},
            **({"normalizer.json": self.spelling} if self.spelling else {}),
        }  # fmt: skip
        for name, content in files.items():
            text = json.dumps(content, ensure_ascii=False, indent=None if name == "vocab.json" else 1)
            (folder / name).write_text(text + "\n", encoding="utf-8")
        lines = ["#version: 0.2", *(" ".join(pair) for pair in self.merges)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make(state: dict) -> WhisperTokenizer:
    """The tokenizer whose `state()` a checkpoint holds."""
    given = {name: value for name, value in state.items() if name != "kind"}
    return WhisperTokenizer(**{**given, "merges": [tuple(pair.split(" ")) for pair in state["merges"]]})


def special_tokens(first: int, languages: Iterable[str], timestamps: bool) -> dict[str, int]:
    """Special tokens to ids from `first` on, in OpenAI's order."""
    names = [END, START, *(f"<|{code}|>" for code in languages), *AFTER_LANGUAGES, *(TIMESTAMPS if timestamps else ())]
    return {name: first + i for i, name in enumerate(names)}


def train_bpe(texts: Iterable[str], vocab_size: int, language: str) -> WhisperTokenizer:
    """A vocabulary from scratch of at most `vocab_size` tokens, special ones included: every byte, so that no text has
    anything unknown, and merges learned from `texts` within GPT-2's pre-tokens. No timestamps: transcripts without
    times could not train those 1501 rows, which would outweigh the whole vocabulary. Raises `UsageError`."""
    tokenizers = _library()
    least = len(BYTES) + len(special_tokens(0, [language], timestamps=False))
    if vocab_size < least:
        raise UsageError(f"--vocab_size {vocab_size} is too few: 256 bytes and the special tokens need {least}")
    bpe = _byte_level(tokenizers, {}, [])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - least + len(BYTES), initial_alphabet=BYTES, show_progress=False, min_frequency=2
    )
    bpe.train_from_iterator(iter(texts), trainer)
    trained = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in trained["merges"]]
    return WhisperTokenizer(trained["vocab"], merges, special_tokens(len(trained["vocab"]), [language], False))


def train_symbols(symbols: Iterable[str], language: str) -> WhisperTokenizer:
    """A vocabulary from scratch in which each of `symbols` is one token, and so is the space; nothing is trained. A
    character of several bytes becomes one token by merging them; symbols of several characters must be ASCII, because
    a byte-level decoder reads such a token as bytes. Text of anything else loses it in `encode`. No timestamps, as in `train_bpe`. Raises `UsageError`."""
    symbols = list(dict.fromkeys([" ", *symbols]))
    longer = [symbol for symbol in symbols if len(symbol) > 1]
    for symbol in longer:
        if not (symbol.isascii() and symbol.isprintable() and " " not in symbol):
            raise UsageError(f"the symbol {symbol!r}: one of several characters must be printable ASCII without spaces")
    tokens, merges = [], []
    for symbol in symbols:
        raw = symbol.encode()
        tokens.append(symbol if symbol in longer else _stand_in(raw))
        if symbol not in longer:
            merges += [(_stand_in(raw[:i]), _stand_in(raw[i : i + 1])) for i in range(1, len(raw))]
    # What the merges begin with comes last: no text gives those tokens.
    tokens = dict.fromkeys([*tokens, *(part for pair in merges for part in (*pair, "".join(pair)))])
    vocab = {token: i for i, token in enumerate(tokens)}
    return WhisperTokenizer(vocab, list(dict.fromkeys(merges)), special_tokens(len(vocab), [language], False), longer)


def read(path: str | Path, language: str | None, task: str = "transcribe", vocab_size: int | None = None):
    """The tokenizer of a released model: a Hugging Face folder (`tokenizer.json`, or `vocab.json` with `merges.txt`),
    one `tokenizer.json`, or OpenAI's `multilingual.tiktoken` or `gpt2.tiktoken`, whose special tokens follow from the
    model's `vocab_size`. Raises `UsageError`."""
    path = Path(path)
    inside = [path / name for name in ("tokenizer.json", "vocab.json")] + sorted(
        path.glob("*.tiktoken"), key=lambda f: (f.stem == "gpt2") != (vocab_size == ENGLISH_ONLY_SIZE)
    )
    file = next((f for f in inside if f.is_file()), None) if path.is_dir() else path
    if file is None:
        raise UsageError(
            f"{path} holds no tokenizer: it needs tokenizer.json, vocab.json with merges.txt, or OpenAI's multilingual.tiktoken; --tokenizer_file names one elsewhere"
        )
    try:
        if file.suffix == ".tiktoken":
            tokenizer = _from_tiktoken(file, language, task, vocab_size)
        else:
            tokenizer = _from_hugging_face(file, language, task)
    except OSError as error:
        raise UsageError(f"{error.filename or file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if _is_pointer(file):
            raise UsageError(f"{file} is a pointer of Git LFS, not the file: fetch it with `git lfs pull`") from None
        reason = str(error).split("\n")[0][:120]
        raise UsageError(f"{file} is no tokenizer of Whisper ({type(error).__name__}: {reason})") from None
    if vocab_size and tokenizer.size > vocab_size:
        raise UsageError(
            f"{file} has {tokenizer.size} tokens and the model {vocab_size}: it belongs to another model; take that model's own"
        )
    return tokenizer


def _is_pointer(file: Path) -> bool:
    with open(file, "rb") as opened:
        return opened.read(40).startswith(b"version https://git-lfs")


def _json(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8-sig")) if file.is_file() else {}


def _from_hugging_face(file: Path, language: str | None, task: str) -> WhisperTokenizer:
    content = _json(file) if file.is_file() else json.loads(file.read_text())  # the latter for its error
    if file.name == "vocab.json":
        vocab, lines = content, (file.parent / "merges.txt").read_text(encoding="utf-8").split("\n")
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        described = _json(file.parent / "tokenizer_config.json").get("added_tokens_decoder", {})
        added = {entry["content"]: int(i) for i, entry in described.items()}
        added |= _json(file.parent / "added_tokens.json")
        special = {entry["content"] for entry in described.values() if entry.get("special")}
    else:
        model = content["model"]
        if model.get("type", "BPE") != "BPE":
            raise UsageError(f"{file} holds a {model['type']} tokenizer; Whisper's is a byte-level BPE")
        vocab = model["vocab"]
        merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
        special = {entry["content"] for entry in content.get("added_tokens", []) if entry.get("special")}
    if not all(isinstance(i, int) for i in (*vocab.values(), *added.values())) or any(len(p) != 2 for p in merges):
        raise ValueError("ids that are no numbers, or merges that are no pairs")
    shaped = re.compile(r"<\|[^|]+\|>")
    every = vocab | added
    specials = {t: i for t, i in every.items() if shaped.fullmatch(t) or t in special}
    symbols = [t for t in sorted(added, key=added.get) if t not in specials]
    vocab = {t: i for t, i in every.items() if t not in specials}
    english_only = specials.get(END) == ENGLISH_ONLY_END and len(vocab) == ENGLISH_ONLY_END
    return WhisperTokenizer(
        vocab,
        merges,
        specials,
        symbols,
        language,
        task,
        not english_only,
        _json(file.parent / "normalizer.json") or None,
    )


def _from_tiktoken(file: Path, language: str | None, task: str, vocab_size: int | None) -> WhisperTokenizer:
    rows = [line.split() for line in file.read_bytes().splitlines() if line.strip()]
    # OpenAI's multilingual file ends with a token of no bytes ("="), which some decoders refuse.
    ranks = {base64.b64decode(token) if token.strip(b"=") else b"": int(rank) for token, rank in rows}
    if sorted(ranks.values()) != list(range(len(rows))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("its ranks are not 0, 1, 2 ..., or bytes are missing")
    merges = [_halves(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    fixed = len(special_tokens(0, (), timestamps=True))
    count = (vocab_size or len(ranks) + fixed + 99) - len(ranks) - fixed
    if not 1 <= count <= len(LANGUAGES):
        raise UsageError(f"{file} has {len(ranks)} text tokens, which does not go with the model's {vocab_size} tokens")
    vocab = {_stand_in(token): rank for token, rank in ranks.items()}
    specials = special_tokens(len(vocab), LANGUAGES[:count], timestamps=True)
    return WhisperTokenizer(vocab, merges, specials, (), language, task, multilingual=specials[END] != ENGLISH_ONLY_END)


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[str, str]:
    """The merge that made `token`: what BPE leaves of it with the tokens before it alone."""
    parts, limit = [token[i : i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        found = [(ranks.get(a + b, limit), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        rank, i = min(found)
        if rank >= limit:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    if len(parts) != 2:
        raise DataError(f"the token {token!r} cannot be made by merging two others")
    return _stand_in(parts[0]), _stand_in(parts[1])
