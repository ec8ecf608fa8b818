"""The vocabulary of a wav2vec2 model: the released one, with further characters, or a small one
made from texts; and the rows that the pieces have in the head.

`info` stands for a `ModelInfo` of start.py. The functions return new ones; those that they are
given stay as they are. New rows are drawn with torch's generator."""

import dataclasses
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from common.errors import DataError, UsageError
from models import new_rows
from models.wav2vec2.texts import Style
from models.wav2vec2.tokenizer import SPACE, Wav2Vec2Tokenizer, with_added
from speech.writing import unknown
from speech.writing.profile import Profile
from speech.writing.text import characters_of

ROWS = ("lm_head.weight", "lm_head.bias")  # the tensors with a row for each piece
BLANK = "<blank>"  # in `row_names`, also of omniASR, whose <pad> is another piece
UNKNOWN = "<unk>"
PAD = "<pad>"  # the blank of a vocabulary of characters
# A character is rare, and no reason for another vocabulary, if there are no more than so many, or
# than this share of all characters.
FEW = 2
RARE = 1e-4
# What can be done about digits where the model spells numbers.
DIGITS_ADVICE = (
    "write numbers inside words (20th) as words, add --keep_text to leave them as they are, "
)
NOISE = 0.1  # of new rows' deviation from where they begin, in deviations of the old rows
BIAS = -2.0  # of new rows, added to that of where they begin: an old letter is likelier at first
FIRST_DEVIATION = 0.02  # of the weights of a head that is all new
FIRST_BLANK = 1.0  # bias of its blank, which is most frames' label

# --- which vocabulary -----------------------------------------------------------------------------


def require_characters(
    texts: Iterable[str], tokenizer: Wav2Vec2Tokenizer, style: Style | None, allow: bool
) -> None:
    """Raises `DataError` if training texts have characters that the vocabulary lacks, unless all of
    them are rare, or `allow` is True."""
    texts = list(texts)
    counts = Counter(letter for text in texts for letter in tokenizer.lacking(text))
    most = max(FEW, RARE * sum(len(text) - text.count(" ") for text in texts))
    often = Counter({letter: count for letter, count in counts.items() if count > most})
    if often and not allow:
        extends = "add --vocab extended to add them, " if _letters(often, style) else DIGITS_ADVICE
        raise DataError(
            f"the vocabulary lacks characters of the training texts: {unknown.named(often)}:"
            f" {extends}add --vocab own for a small vocabulary of these texts, or --allow_unknown"
            " to train without them"
        )


# `style` is that of the texts, or None if they are as they came. Digits are not added to a
# vocabulary whose style spells numbers: its `texts.style_of` would be another one, and change the
# texts of a run that is resumed.


def extended(tokenizer: Wav2Vec2Tokenizer, texts: Iterable[str], style: Style | None) -> dict:
    """The state of a tokenizer with the characters of `texts` that `tokenizer` lacks, the most
    frequent first. Raises `UsageError` if it lacks none, or for one that it cannot have."""
    counts = Counter(letter for text in texts for letter in tokenizer.lacking(text))
    if not counts:
        raise UsageError("--vocab extended: the vocabulary has all characters; leave it out")
    # The delimiter and special pieces cannot be letters, too.
    lacking = counts.keys() - {tokenizer.state().get("delimiter"), *tokenizer.pieces}
    added = sorted(_letters(lacking, style), key=lambda letter: (-counts[letter], letter))
    digits = Counter({sign: count for sign, count in counts.items() if sign.isdecimal()})
    if not added and digits:
        raise UsageError(
            f"--vocab extended adds no digits, and the texts have {unknown.named(digits)}:"
            f" {DIGITS_ADVICE}or take --vocab own"
        )
    return with_added(tokenizer.state(), added)


def own(texts: Iterable[str], letters: Profile | None = None) -> dict:
    """The state of a tokenizer of the characters of `texts`, or of the units of a profile."""
    characters = {*(letters.vocabulary(texts) if letters else characters_of(texts))}
    characters = _letters(characters - {SPACE}, None)  # the delimiter would be a space
    state = {
        "kind": "characters",
        "pieces": [PAD, UNKNOWN, SPACE, *sorted(characters)],
        "delimiter": SPACE,
        "blank": 0,
        "unknown": 1,
        "lower": False,
    }
    return {**state, "profile": letters.kept()} if letters else state


def padded(state: dict, size: int) -> dict:
    """The state of a vocabulary of characters with at least `size` pieces, the last of no text."""
    pieces = state["pieces"]
    unused = [f"<unused {number}>" for number in range(len(pieces), size)]
    return {**state, "pieces": [*pieces, *unused]}


def _letters(characters: Iterable[str], style: Style | None) -> set[str]:
    spells = style is not None and style.spells_numbers
    return {sign for sign in characters if not sign.isspace() and not (spells and sign.isdecimal())}


# --- rows -----------------------------------------------------------------------------------------


def row_names(tokenizer: Wav2Vec2Tokenizer) -> list[str]:
    """The meaning of each row of the head: pieces; blank and unknown have one name everywhere."""
    names = tokenizer.pieces[:]
    names[tokenizer.blank] = BLANK
    if tokenizer.unknown is not None:
        names[tokenizer.unknown] = UNKNOWN
    return names


def with_new_vocabulary(info, weights: dict[str, torch.Tensor], state: dict):
    """A trained model with the tokenizer of `state`: its info and its weights. Rows of pieces that
    it has are kept, also if the letter has another case now. The others begin near the row of a
    letter that looks like them, or near the mean of all rows. A model without a head gets small
    random rows. Pieces that were new in `info` still are."""
    tokenizer = Wav2Vec2Tokenizer(state)
    names = row_names(tokenizer)
    config = {**info.config, "vocabulary": tokenizer.size, "blank": tokenizer.blank}
    new = dataclasses.replace(info, config=config, tokenizer=state)
    if not info.config["vocabulary"]:
        print(f"new vocabulary: {tokenizer.size} pieces; the model had none")
        head = first_head(tokenizer, config["hidden_size"])
        new = dataclasses.replace(new, new_pieces=list(range(tokenizer.size)))
        return new, {**weights, **dict(zip(ROWS, head, strict=True))}
    old = row_names(Wav2Vec2Tokenizer(info.tokenizer))
    places = {name: row for row, name in enumerate(old)}
    rows = new_rows.sources([_old_name(name, names, places) for name in names], old)
    likes = [next((places[c] for c in alike(name) if c in places), None) for name in names]
    changed = {**weights}
    for name in ROWS:
        changed[name] = new_rows.with_rows(weights[name], rows, first_rows(weights[name], likes))
    return new_rows.noted(new, info, rows, tokenizer.size), changed


def _old_name(name: str, names: list[str], places: dict[str, int]) -> str:
    other = name.swapcase()
    is_renamed = name not in places and other not in names
    return other if is_renamed else name


def first_rows(old: torch.Tensor, likes: list[int | None]) -> torch.Tensor:
    """Rows near those of `old`, weights (V, D) or biases (V,), that have the numbers `likes`; for
    None near the mean of all rows."""
    mean = len(old)
    near = [mean if like is None else like for like in likes]
    near = torch.cat([old, old.mean(0, keepdim=True)])[near]
    if old.dim() == 1:
        return near + BIAS
    return near + torch.randn_like(near) * NOISE * old.std(0, correction=0)


def first_head(tokenizer: Wav2Vec2Tokenizer, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights (V, D) and biases (V,) of a new head."""
    bias = torch.zeros(tokenizer.size)
    bias[tokenizer.blank] = FIRST_BLANK
    return torch.randn(tokenizer.size, width) * FIRST_DEVIATION, bias


def alike(character: str) -> Iterator[str]:
    """Characters that look like this one, the likest first: in another case, without accents
    (\u00e9: e), and by the name that Unicode gives (\u0253, b with hook: b; \u025b, open e: e)."""
    if len(character) > 1 or character == SPACE:
        return
    name = unicodedata.name(character, "").partition(" WITH ")[0].replace(" OPEN ", " ")
    decomposed = unicodedata.normalize("NFKD", character)[0]
    try:
        named = unicodedata.lookup(name)
    except KeyError:
        named = character
    for like in (character, decomposed, named):
        yield from (like, like.lower(), like.upper())
