"""Whisper's tokenizer: byte-level BPE with special tokens. Reading, training, and writing for
`transformers`."""

import argparse
import base64
import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from common import files, records
from common.errors import DataError, UsageError, first_line, require
from models.model_files import refuse_pointer
from models.whisper.formats import CONFIG
from speech.writing import languages

# In the order of the released vocabularies; yue came with large-v3.
LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th"
    " ur hr bg lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr"
    " pa si km sn yo so af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt"
    " haw ln ha ba jw su yue"
).split()
# For a language without a token: near relatives first, else the language whose words it borrows or
# whose spelling it follows. Only what a linguist would name; the others are named by script. A row:
# languages, and what each of them may borrow.
_RELATED = """
    kok gom: mr hi kn; bho mai awa mag raj hne: hi ne; doi: pa hi; or ory: bn hi; syl: bn as;
    tcy: kn; skr: pa ur; ti tig gez: am; qu quy quz ay gn nah yua ast an: es; ig tw ak ee: yo;
    xh zu ss nr st tn nso ts ve ny: sn sw; rw rn lg ki bem kg lua: sw sn ln; om aa sid: so;
    ku kmr ckb: fa; ky kaa: kk; ug: uz; cv crh sah: tt tr; ga gd gv: cy br; kw: br cy; fy: nl de;
    gsw: de; nds: de nl; rm fur sc scn vec lij co: it; dsb: pl cs; hsb: cs pl; csb: pl; rue: uk;
    se: fi; krl olo vep: fi et; ilo ceb hil: tl; min ace ban mad: id ms jw; sm to ty: mi haw;
    dv: si; dz: bo; ady ab: ru; os: fa ru; wo ff bm: fr; yue nan hak wuu cdo: zh; prs: fa;
    arz apc ary acm: ar
"""
RELATED = {
    code: tuple(near.split())
    for codes, _, near in (row.partition(":") for row in _RELATED.split(";"))
    for code in codes.split()
}
OWN_CODES = {"jv": "jw"}  # Whisper's, by ISO's
# The name of a language's token, which may have been added to a released vocabulary.
LANGUAGE = re.compile(r"<\|([A-Za-z]{2,3}(?:[-_][A-Za-z0-9]+)*)\|>")
TRANSLATE = "translate"
TASKS = (TRANSLATE, "transcribe")
EOS = "<|endoftext|>"
START = "<|startoftranscript|>"
NO_TIMESTAMPS = "<|notimestamps|>"
PREVIOUS = "<|startofprev|>"
START_OF_LM = "<|startoflm|>"
SIGNS = '"#()*+/:;<=>@[\\]^_`{|}~「」『』'  # that nobody says
SIGNS_TOGETHER = "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split()
MUSIC = "♩♪♫♬♭♮♯"
NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")  # OpenAI's name, and older Hugging Face folders'
AFTER_LANGUAGES = (
    *(f"<|{t}|>" for t in TASKS),
    START_OF_LM,
    PREVIOUS,
    NO_SPEECH[0],
    NO_TIMESTAMPS,
)
TIME_STEP = 0.02  # seconds between two time tokens
TIMESTAMPS = [f"<|{i * TIME_STEP:.2f}|>" for i in range(1501)]
_TIMESTAMPS = frozenset(TIMESTAMPS)
# Letters of scripts without spaces between words: Thai, Lao, Burmese, Chinese and Japanese. Of the
# languages of these, released models write no space before a text.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u2e80-\u312f\u3190-\u9fff\uf900-\ufaff\uff00-\uffef]"
)
ENGLISH_ONLY_SIZE = 51_864
ENGLISH_ONLY_EOS = 50_256  # the id of eos in GPT-2's vocabulary, which the English-only models use
LONGEST_TOKEN = 256  # bytes of a token of a .tiktoken file; the released ones have up to 128
# The schema of `WhisperTokenizer.state()`, for `records.mismatch`.
STATE = {
    "kind": {"whisper"},
    "vocab": dict,
    "merges": [str],
    "specials": dict,
    "symbols": [str],
    "language": str,
    "task": {*TASKS},
    "multilingual": bool,
    "spelling": (type(None), dict),
}


def _byte_characters() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes: its own if that is printable, else one
    from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(256)]


BYTES = _byte_characters()
BYTE_OF = {character: byte for byte, character in enumerate(BYTES)}


def _byte_level_token(raw: bytes) -> str:
    return "".join(BYTES[byte] for byte in raw)


def _raw(token: str) -> bytes:
    """The bytes of a token of the vocabulary. One with other characters than BYTES is a text."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "replace")


def _library():
    # Its threads conflict with forked data workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return require("tokenizers", "Whisper's tokenizer")


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]):
    tokenizers = _library()
    try:
        model = tokenizers.models.BPE(
            vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""
        )
    except Exception as error:  # the library raises no other type
        raise ValueError(str(error)) from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


class WhisperTokenizer:
    """Byte-level BPE with Whisper's special tokens.

    `vocab`: text tokens (in BYTES characters) to ids. `merges`: pairs of tokens, by priority.
    `specials`: special tokens and timestamps to ids. `symbols`: tokens of `vocab` that are matched
    before the text is split, such as `<SK>`. `spelling`: the content of a `normalizer.json`, which
    is only kept. Raises `UsageError` for a language that the vocabulary lacks, and
    `ValueError`, `KeyError` or `TypeError` for a vocabulary that is damaged.

    Attributes: the ids `eos`, `start`, `no_timestamps`, `no_speech`, `previous` (of
    <|startofprev|>) and `timestamp_begin` (the last four are None if the vocabulary lacks them),
    `prompt` (the decoder's first tokens), `timed_prompt` (the same before a text with times),
    `size` (of the vocabulary), `languages` (codes), `language` (the code of the token), `spoken`
    (the language of the texts, which may have borrowed it)."""

    kind = "whisper"

    def __init__(
        self,
        vocab: dict[str, int],
        merges: list[tuple[str, str]],
        specials: dict[str, int],
        symbols: Iterable[str] = (),
        language: str | None = None,
        task: str = "transcribe",
        multilingual: bool = True,
        spelling: dict | None = None,
    ):
        _require_sound(vocab, merges, specials, symbols)
        self.vocab = vocab
        self.merges = merges
        self.specials = specials
        self.symbols = list(symbols)
        self.multilingual = multilingual
        self.spelling = spelling
        self.size = 1 + max(*vocab.values(), *specials.values())
        self.eos = specials[EOS]
        self.start = specials[START]
        self.no_timestamps = specials.get(NO_TIMESTAMPS)
        self.no_speech = next((specials[name] for name in NO_SPEECH if name in specials), None)
        self.previous = specials.get(PREVIOUS)
        self.timestamp_begin = specials.get(TIMESTAMPS[0])
        last = specials.get("<|translate|>", 0)
        ordered = sorted(specials.items(), key=lambda pair: pair[1])
        self.languages = [
            name[2:-2]
            for name, i in ordered
            if self.start < i < last or (i > last and LANGUAGE.fullmatch(name))
        ]
        self.raw = {i: _raw(token) for token, i in vocab.items()}
        self.bpe = _byte_level(vocab, merges)
        # The BPE does not know the special tokens, so a transcript cannot contain one.
        added = _library().AddedToken
        self.bpe.add_tokens([added(symbol, normalized=False) for symbol in self.symbols])
        self.task = task
        self.spoken, self.language = self._checked(language)
        self.prompt = [self.start]
        if multilingual:
            self.prompt += [specials[f"<|{self.language}|>"], specials[f"<|{task}|>"]]
        self.timed_prompt = list(self.prompt)
        if self.no_timestamps is not None:
            self.prompt.append(self.no_timestamps)

    def in_language(self, prompt: Sequence[int], language: str) -> list[int]:
        """A prompt of this vocabulary in the language of a row (see `token_of`); as it is if the
        row names none."""
        prompt = list(prompt)
        if self.multilingual and (code := self.token_of(language)):
            prompt[prompt.index(self.start) + 1] = self.specials[f"<|{code}|>"]
        return prompt

    def token_of(self, name: str) -> str | None:
        """The vocabulary's code for a language that is written in any way (vi-VN, eng, Lingala),
        also for the one that borrows a token; None if it has none."""
        return self.language if self.spoken in languages.forms(name) else self._own_code(name)

    def _own_code(self, name: str) -> str | None:
        forms = languages.forms(name)
        if not self.multilingual:
            return "en" if "en" in forms else None
        known = {code.lower().replace("_", "-"): code for code in self.languages}
        codes = [known[form] for form in (*forms, *map(OWN_CODES.get, forms)) if form in known]
        return codes[0] if codes else None

    def speaks(self, told: str) -> bool:
        """Whether `told`, a value of --language, means what this tokenizer was made for."""
        spoken, _, name = told.rpartition("=")
        return self.token_of(name) == self.language and spoken in ("", self.spoken)

    def _checked(self, told: str | None) -> tuple[str, str]:
        """The language of the texts, and the code of its token, of `told`: a language, or
        "mdw=ln" for one that borrows a token. "" is any language."""
        if not self.multilingual:
            if told not in (None, "", "en"):
                raise UsageError(
                    f"language {told}: this is an English-only model; take a multilingual one"
                )
            return "en", "en"
        if told == "" or (told is None and len(self.languages) == 1):
            told = self.languages[0]
        if told is None:
            raise UsageError(languages.ASK)
        spoken, _, name = told.rpartition("=")
        if code := self._own_code(name):
            return spoken or code, code
        borrower = spoken or name
        related = RELATED.get(languages.code_of(borrower), ())
        near = [code for code in related if code in self.languages]
        advice = f"a related language ({' '.join(near)})"
        if not near:
            near = ["ln"]
            advice = "a relative, or of one that is written alike: docs/your_language.md lists all"
        raise UsageError(
            f"language {name}: Whisper has no token for it; {borrower} can borrow that of {advice};"
            f" --language {borrower}={near[0]} lends it that of {languages.described(near[0])}"
        )

    @property
    def told(self) -> str:
        """The language as --language gives it: "ln", or "mdw=ln" for one that borrows the token."""
        is_own = self.spoken == self.language
        return self.language if is_own else f"{self.spoken}={self.language}"

    @property
    def tokens(self) -> list[str]:
        """The tokens by id; those of the text in BYTES characters."""
        names = {i: token for token, i in (*self.vocab.items(), *self.specials.items())}
        return [names.get(i, f"<unused {i}>") for i in range(self.size)]

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, in which the name of a special token is plain text. As in
        `transformers`, bytes without a token, which only a vocabulary of `train_symbols` has, are
        dropped."""
        return self.bpe.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, without special tokens and ids beyond the vocabulary; U+FFFD for
        incomplete UTF-8."""
        raw = b"".join(self.raw.get(int(token), b"") for token in tokens)
        return raw.decode("utf-8", "replace")

    @property
    def times(self) -> range:
        """The ids of the time tokens, 20 ms apart; none if the vocabulary has none."""
        first = self.timestamp_begin
        return range(0) if first is None else range(first, first + len(TIMESTAMPS))

    def time(self, seconds: float) -> int:
        """The time token of a place in a window of up to 30 s; for a vocabulary that has them."""
        return self.timestamp_begin + min(round(seconds / TIME_STEP), len(TIMESTAMPS) - 1)

    def state(self) -> dict:
        """Dicts, lists and strings for a checkpoint, for `make_tokenizer`."""
        return {
            "kind": self.kind,
            "vocab": self.vocab,
            "merges": [" ".join(pair) for pair in self.merges],
            "specials": self.specials,
            "symbols": self.symbols,
            "language": self.told,
            "task": self.task,
            "multilingual": self.multilingual,
            "spelling": self.spelling,
        }

    def file_texts(self) -> dict[str, str]:
        """The texts, by the names of their files, that `transformers` reads (WhisperTokenizer,
        AutoTokenizer, WhisperProcessor), with the same ids and the same decoding. Its class
        rebuilds the tokenizer from vocabulary, merges and added tokens, so nothing else may carry
        information."""
        ordered = sorted(self.specials.items(), key=lambda pair: pair[1])
        names = [name for name, _ in ordered if name not in _TIMESTAMPS]
        # (name, id, is special): timestamps are not special, so that skip_special_tokens keeps
        # them.
        added = [(symbol, self.vocab[symbol], False) for symbol in self.symbols]
        added += [(name, i, name not in _TIMESTAMPS) for name, i in ordered]
        # The library numbers added tokens after the vocabulary. If that gives other ids, the
        # vocabulary includes them.
        first = len(self.vocab)
        is_appended = [i for _, i in ordered] == list(range(first, first + len(ordered)))
        vocab = self.vocab if is_appended else {**self.vocab, **self.specials}
        special = {
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), EOS),
            "additional_special_tokens": names,
        }
        contents = {
            "tokenizer.json": self._fast_tokenizer(vocab, added),
            "tokenizer_config.json": self._config(special, added),
            "vocab.json": vocab,
            "special_tokens_map.json": special,
            "added_tokens.json": {name: i for name, i, _ in added},
        }
        if self.spelling:
            contents["normalizer.json"] = self.spelling
        lines = ["#version: 0.2", *(" ".join(pair) for pair in self.merges)]
        texts = {"merges.txt": "\n".join(lines) + "\n"}
        for name, content in contents.items():
            indent = None if name == "vocab.json" else 1
            texts[name] = json.dumps(content, ensure_ascii=False, indent=indent) + "\n"
        return texts

    def _fast_tokenizer(self, vocab: dict[str, int], added: list[tuple[str, int, bool]]) -> dict:
        """The content of `tokenizer.json`."""
        tokenizers = _library()
        whole = _byte_level(vocab, self.merges)
        # In groups, because each call is slow.
        for is_special, group in itertools.groupby(added, key=lambda entry: entry[2]):
            tokens = [
                tokenizers.AddedToken(name, normalized=False, special=is_special)
                for name, _, _ in group
            ]
            if is_special:
                whole.add_special_tokens(tokens)
            else:
                whole.add_tokens(tokens)
        names = {i: name for name, i in self.specials.items()}
        prompt = [names[token] for token in self.prompt]
        whole.post_processor = tokenizers.processors.TemplateProcessing(
            single=[*prompt, "$A:0", EOS],
            pair=[*prompt, "$A:0", "$B:1", EOS],
            special_tokens=[(name, self.specials[name]) for name in (*prompt, EOS)],
        )
        return json.loads(whole.to_str())

    def _config(self, special: dict, added: list[tuple[str, int, bool]]) -> dict:
        """The content of `tokenizer_config.json`."""
        # `transformers` finds a language by counting from <|startoftranscript|> along OpenAI's
        # list.
        is_listed = self.multilingual and self.language in LANGUAGES
        is_listed = is_listed and self.prompt[1] == self.start + 1 + LANGUAGES.index(self.language)
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        by_id = sorted(added, key=lambda entry: entry[1])
        return {
            "tokenizer_class": "WhisperTokenizer",
            "processor_class": "WhisperProcessor",
            **special,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "model_max_length": 1_000_000_000,
            "language": self.language if is_listed else None,
            "task": self.task if is_listed else None,
            "predict_timestamps": False,
            "added_tokens_decoder": {
                str(i): {"content": name, **flags, "special": is_special}
                for name, i, is_special in by_id
            },
        }


def spaced(text: str) -> str:
    """A text with the space that a released model writes before it."""
    return text if UNSPACED.search(text) else f" {text}"


def joined(texts: Iterable[str]) -> str:
    """Texts one after the other, as a released model writes them."""
    return "".join(map(spaced, texts)).strip()


def suppressed(tokenizer: WhisperTokenizer) -> dict[str, list[int]]:
    """The tokens that OpenAI's program never generates, and those it does not begin with: signs
    that nobody says, with and without a space before them, and special tokens other than times.
    Hugging Face's generation_config.json has the same lists."""
    tokens = {tokenizer.encode(each)[0] for each in (" -", " '")}
    for sign in [*SIGNS, *SIGNS_TOGETHER, *MUSIC]:
        for ids in (tokenizer.encode(sign), tokenizer.encode(f" {sign}")):
            if len(ids) == 1 or sign in MUSIC:
                tokens.add(ids[0])
    names = (START, PREVIOUS, START_OF_LM, *NO_SPEECH, *(f"<|{task}|>" for task in TASKS))
    tokens |= {tokenizer.specials[name] for name in names if name in tokenizer.specials}
    first = [*tokenizer.encode(" "), tokenizer.eos]
    return {"suppress_tokens": sorted(tokens), "begin_suppress_tokens": first}


def _require_sound(vocab: dict, merges: list, specials: dict, symbols: Iterable) -> None:
    """Raises `ValueError` or `TypeError` if a `WhisperTokenizer` cannot be made of these."""
    ids = [*vocab.values(), *specials.values()]
    most = CONFIG["vocab_size"][-1]
    if any(type(i) is not int or not 0 <= i < most for i in ids):
        raise ValueError(f"its ids are not whole numbers below {most}")
    if len(set(ids)) < len(ids):
        raise ValueError("several tokens have the same id")
    if not vocab.keys() >= {*symbols} or not "".join(specials).isprintable():
        raise ValueError("its added tokens are not sound")
    "".join(vocab).encode()  # half of a surrogate pair could not be written


@contextlib.contextmanager
def _refused(name: str | Path) -> Iterator[None]:
    """Whatever a damaged vocabulary raises becomes a `UsageError` that calls it `name`."""
    try:
        yield
        return
    except KeyError as error:
        reason = f"it lacks {error}"
    except ValueError as error:
        reason = first_line(error)
    except (TypeError, AttributeError, IndexError):
        reason = "a part of it has another type"
    raise UsageError(f"{name} is not a Whisper tokenizer ({reason[:120]})")


def make_tokenizer(state: dict) -> WhisperTokenizer:
    """The tokenizer of a checkpoint, from its `state()`. Raises `UsageError` if it is damaged."""
    with _refused("the saved tokenizer"):
        reason = records.mismatch(state, STATE, "it")
        if reason:
            raise ValueError(reason)
        given = {name: state[name] for name in STATE if name != "kind"}
        given["merges"] = [tuple(pair.split(" ")) for pair in state["merges"]]
        return WhisperTokenizer(**given)


def language_code(text: str) -> str:
    """An argparse type: a language by its code or name, perhaps with the one whose token it
    borrows: vi, Lingala, kok, zh-tw, mdw=ln. Codes are in lower case, as transformers looks them
    up."""
    parts = [languages.exact(part) for part in text.split("=")]
    for part in parts:
        is_code = re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", part) and 2 <= len(part) <= 20
        reserved = (*special_tokens(0, (), timestamps=False), *NO_SPEECH)
        if not is_code or f"<|{part}|>" in reserved or len(parts) > 2:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a language, such as vi, Lingala or zh-tw, or mdw=ln for mdw"
                " with the token of ln"
            )
    return "=".join(parts)


def special_tokens(first: int, languages: Iterable[str], timestamps: bool) -> dict[str, int]:
    """Special tokens to ids from `first` on, in OpenAI's order."""
    names = [EOS, START, *(f"<|{code}|>" for code in languages), *AFTER_LANGUAGES]
    if timestamps:
        names += TIMESTAMPS
    return {name: first + i for i, name in enumerate(names)}


# --- training -------------------------------------------------------------------------------------


def train_bpe(
    texts: Iterable[str], vocab_size: int, language: str, others: Iterable[str] = ()
) -> WhisperTokenizer:
    """Trains a vocabulary of at most `vocab_size` tokens, special ones included, among them those
    of `language` and of the `others` that rows name. It has all 256 bytes, so that no text is
    unknown, and merges learned from `texts` within GPT-2's pre-tokens. It has no timestamps:
    transcripts without times could not train their 1501 embeddings, which would outnumber the other
    tokens. Raises `UsageError`."""
    codes = _new_codes(language, others)
    least = len(BYTES) + len(special_tokens(0, codes, timestamps=False))
    if vocab_size < least:
        raise UsageError(
            f"--vocab_size {vocab_size} is too few: 256 bytes and the special tokens need {least}"
        )
    bpe = _byte_level({}, [])
    trainer = _library().trainers.BpeTrainer(
        vocab_size=vocab_size - least + len(BYTES),
        initial_alphabet=BYTES,
        show_progress=False,
        min_frequency=2,
    )
    bpe.train_from_iterator(iter(texts), trainer)
    trained = json.loads(bpe.to_str())["model"]
    vocab = trained["vocab"]
    specials = special_tokens(len(vocab), codes, timestamps=False)
    return WhisperTokenizer(vocab, _pairs(trained["merges"]), specials, language=language)


def _new_codes(language: str, others: Iterable[str]) -> list[str]:
    """The codes of the languages of a new vocabulary, in which no language borrows a token."""
    codes = [language.rpartition("=")[2]]
    for name in sorted(filter(None, others)):
        if not {codes[0], *language.split("=")} & {*languages.forms(name)}:
            codes.append(languages.code_of(name))
    return list(dict.fromkeys(codes))


def _pairs(merges: list) -> list[tuple[str, ...]]:
    """Merges as pairs: tokenizer.json has lists or, in older files, a space between."""
    return [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in merges]


def train_symbols(symbols: Iterable[str], language: str) -> WhisperTokenizer:
    """A vocabulary with one token for each of `symbols` and the space; nothing is trained. A
    character of several bytes becomes one token by merges. Symbols of several characters must be
    ASCII, because a byte-level decoder reads such a token as bytes. `encode` drops all other text.
    No timestamps, as in `train_bpe`. Raises `UsageError`."""
    symbols = list(dict.fromkeys([" ", *symbols]))
    longer = [symbol for symbol in symbols if len(symbol) > 1]
    for symbol in longer:
        if not (symbol.isascii() and symbol.isprintable() and " " not in symbol):
            raise UsageError(
                f"the symbol {symbol!r}: one of several characters must be printable ASCII without"
                " spaces"
            )
    tokens = []
    merges = []
    for symbol in symbols:
        if symbol in longer:
            tokens.append(symbol)
            continue
        raw = symbol.encode()
        tokens.append(_byte_level_token(raw))
        for i in range(1, len(raw)):
            merges.append((_byte_level_token(raw[:i]), _byte_level_token(raw[i : i + 1])))
    # The parts of the merges come last: `encode` does not return them.
    for first, second in merges:
        tokens += [first, second, first + second]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    specials = special_tokens(len(vocab), [language], timestamps=False)
    return WhisperTokenizer(vocab, list(dict.fromkeys(merges)), specials, longer)


# --- reading --------------------------------------------------------------------------------------


def read_tokenizer(
    path: str | Path, language: str | None, vocab_size: int | None = None
) -> WhisperTokenizer:
    """The tokenizer of a released model: a Hugging Face folder (`tokenizer.json`, or `vocab.json`
    with `merges.txt`), one `tokenizer.json`, or OpenAI's `multilingual.tiktoken` or
    `gpt2.tiktoken`, whose special tokens follow from the model's `vocab_size`. Raises
    `UsageError`."""
    path = Path(path)
    file = _tokenizer_file(path, vocab_size) if os.path.isdir(path) else path
    refuse_pointer(file)
    with _refused(file):
        if file.suffix == ".tiktoken":
            tokenizer = _from_tiktoken(file, language, vocab_size)
        else:
            tokenizer = _from_hugging_face(file, language, vocab_size)
    if vocab_size and tokenizer.size > vocab_size:
        raise UsageError(
            f"{file} has {tokenizer.size} tokens and the model {vocab_size}: "
            "it belongs to another model; give this model's"
        )
    return tokenizer


def in_task(tokenizer: WhisperTokenizer, task: str | None) -> WhisperTokenizer:
    """A tokenizer with the prompt of a task, None for its own. Raises `UsageError` for an
    English-only model, whose prompt has none."""
    if task in (None, tokenizer.task):
        return tokenizer
    if not tokenizer.multilingual:
        raise UsageError(f"--task {task}: this is an English-only model; take a multilingual one")
    return make_tokenizer({**tokenizer.state(), "task": task})


def _tokenizer_file(folder: Path, vocab_size: int | None) -> Path:
    is_english_only = vocab_size == ENGLISH_ONLY_SIZE
    tiktoken = sorted(
        folder.glob("*.tiktoken"), key=lambda file: (file.stem == "gpt2") != is_english_only
    )
    for file in (folder / "tokenizer.json", folder / "vocab.json", *tiktoken):
        if file.is_file():
            return file
    raise UsageError(
        f"{folder} has no tokenizer.json, no vocab.json with merges.txt and no"
        " multilingual.tiktoken: give the tokenizer with --tokenizer_file"
    )


def _json(file: Path) -> dict:
    return files.read_json(file) if file.is_file() else {}


def _from_hugging_face(
    file: Path, language: str | None, vocab_size: int | None
) -> WhisperTokenizer:
    """The tokenizer in a vocab.json with its merges.txt, or in a tokenizer.json. Older folders do
    not list the time tokens: these are the last rows of the model."""
    read = _read_vocab_json if file.name == "vocab.json" else _read_tokenizer_json
    vocab, merges, added, special = read(file)
    specials = {}
    text_tokens = {}
    for token, i in (vocab | added).items():
        is_special = token in special or re.fullmatch(r"<\|[^|]+\|>", token)
        (specials if is_special else text_tokens)[token] = i
    symbols = [token for token in sorted(added, key=added.get) if token not in specials]
    listed = 1 + max((vocab | added).values())
    if specials.get(NO_TIMESTAMPS) == listed - 1 and vocab_size == listed + len(TIMESTAMPS):
        specials |= {name: listed + i for i, name in enumerate(TIMESTAMPS)}
    is_gpt2 = specials.get(EOS) == ENGLISH_ONLY_EOS and len(text_tokens) == ENGLISH_ONLY_EOS
    return WhisperTokenizer(
        text_tokens,
        merges,
        specials,
        symbols,
        language,
        multilingual=not is_gpt2,
        spelling=_json(file.parent / "normalizer.json") or None,
    )


def _read_vocab_json(file: Path) -> tuple[dict, list, dict, set]:
    """Vocabulary, merges, added tokens with their ids, and the names of special tokens."""
    lines = files.read_text(file.parent / "merges.txt").split("\n")
    merges = _pairs([line for line in lines if line and not line.startswith("#version")])
    described = _json(file.parent / "tokenizer_config.json").get("added_tokens_decoder", {})
    added = {entry["content"]: int(i) for i, entry in described.items()}
    added |= _json(file.parent / "added_tokens.json")
    special = {entry["content"] for entry in described.values() if entry.get("special")}
    return files.read_json(file), merges, added, special


def _read_tokenizer_json(file: Path) -> tuple[dict, list, dict, set]:
    """The same of a tokenizer.json."""
    content = files.read_json(file)
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise UsageError(f"{file} holds a {model['type']} tokenizer; Whisper's is a byte-level BPE")
    entries = content.get("added_tokens", [])
    added = {entry["content"]: entry["id"] for entry in entries}
    special = {entry["content"] for entry in entries if entry.get("special")}
    return model["vocab"], _pairs(model["merges"]), added, special


def _from_tiktoken(file: Path, language: str | None, vocab_size: int | None) -> WhisperTokenizer:
    """The tokenizer in one of OpenAI's files: a token in base64 and its rank in each line."""
    ranks = {}
    lines = [line.split() for line in files.read_text(file).encode().splitlines() if line.strip()]
    for token, rank in lines:
        # OpenAI's multilingual file ends with a token of no bytes ("="), which some decoders
        # refuse.
        raw = base64.b64decode(token) if token.strip(b"=") else b""
        ranks[raw] = int(rank)
    lacks_bytes = any(bytes([byte]) not in ranks for byte in range(256))
    if lacks_bytes or sorted(ranks.values()) != list(range(len(lines))):
        raise ValueError("its ranks are not 0, 1, 2 ..., or bytes are missing")
    if max(map(len, ranks)) > LONGEST_TOKEN:
        raise ValueError(f"it has a token of more than {LONGEST_TOKEN} bytes")
    fixed = len(special_tokens(0, (), timestamps=True))
    count = (vocab_size or len(ranks) + fixed + 99) - len(ranks) - fixed
    if not 1 <= count <= len(LANGUAGES):
        raise UsageError(
            f"{file} has {len(ranks)} text tokens, which does not go with the model's {vocab_size}"
            " tokens"
        )
    merges = [_merge_of(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    vocab = {_byte_level_token(token): rank for token, rank in ranks.items()}
    specials = special_tokens(len(vocab), LANGUAGES[:count], timestamps=True)
    return WhisperTokenizer(
        vocab, merges, specials, language=language, multilingual=specials[EOS] != ENGLISH_ONLY_EOS
    )


def _merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[str, str]:
    """The merge that makes `token`: the two parts that BPE leaves with tokens of lower rank."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        pairs = enumerate(itertools.pairwise(parts))
        rank, i = min((ranks.get(a + b, limit), i) for i, (a, b) in pairs)
        if rank >= limit:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    if len(parts) != 2:
        raise DataError(f"the token {token!r} cannot be made by merging two others")
    return _byte_level_token(parts[0]), _byte_level_token(parts[1])
