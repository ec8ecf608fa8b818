"""More tokens for a released vocabulary: a language, characters, and pieces of words, with rows in
the GPT's text embedding and head.

The functions return a new `ModelInfo` and new weights; those that they are given stay as they
are."""

import functools
import itertools
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from common.errors import UsageError
from models.xtts.texts import CARRIER, TextOptions, Texts
from models.xtts.tokenizer import Vocabulary, add_pieces, add_tokens, learn_merges, new_rows
from speech.writing.reading import VARIANTS

SEED = 0  # of the row of a language
TEXT_ROWS = ("text_embedding.weight", "text_head.weight", "text_head.bias")  # a row for each token

# The scripts of Coqui's languages, by the first words of their characters' names.
SCRIPTS = (
    "LATIN", "CYRILLIC", "ARABIC", "DEVANAGARI", "CJK", "HANGUL", "HIRAGANA", "KATAKANA",
    "KATAKANA-HIRAGANA", "HALFWIDTH", "FULLWIDTH", "MODIFIER", "COMBINING", "FEMININE", "MASCULINE",
)  # fmt: skip
OWN_MARKS = range(0x0370, 0x2000)  # punctuation that belongs to a script

Weights = dict[str, torch.Tensor] | None  # the GPT's; None: random ones


def add_language(info, weights: Weights):
    """The info and weights with a token for the language of `info`, if the vocabulary lacks it. An
    export has the token too, but not in the languages of its config.json, which Coqui speaks by
    their names: such a language is `carried` by English."""
    listed = info.settings.get("languages")
    is_known = info.language in Vocabulary(info.vocab).languages
    is_unlisted = isinstance(listed, list) and info.language not in listed
    info = replace(info, carried=not is_known or is_unlisted)
    if is_known:
        return info, weights
    info = replace(info, vocab=add_tokens(info.vocab, [f"[{info.language}]"]))
    print(
        f"language {info.language}: a new token; Coqui speaks it as language {CARRIER!r} with texts"
        f" that begin with [{info.language}]"
    )
    return _with_rows(info, weights, SEED)


def extend(info, weights: Weights, texts: Sequence[str], asked: TextOptions):
    """The info and weights of a new model whose vocabulary is extended, as `asked`, by the letters
    and marks that it lacks in `texts`, what it reads of the training texts, and by pieces of words
    in scripts that none of Coqui's languages has; and the number of new tokens. Texts without the
    new letters keep their tokens. Raises `UsageError`."""
    kind = asked.extend_vocab
    size = asked.vocab_size
    if not kind:
        return info, weights, 0
    words = _count_words(texts)
    characters = " ".join(sorted(filter(_is_learned, set().union(*words))))
    lacking = sorted(Vocabulary(info.vocab).lacking(characters))
    merges = []
    if kind == "bpe":
        if len(lacking) > size:
            raise UsageError(
                f"--vocab_size {size} is too few for the {len(lacking)} characters that are new:"
                " raise it"
            )
        merges = learn_merges(_runs(words), size - len(lacking))
    old_size = info.config["text_tokens"]
    info = replace(
        info,
        vocab=add_pieces(info.vocab, lacking, merges),
        text=replace(info.text, extend_vocab=kind, vocab_size=size),
    )
    # The seed differs between extensions, so that their rows do.
    info, weights = _with_rows(info, weights, seed=old_size)
    added = info.config["text_tokens"] - old_size
    if not added:
        print(f"vocabulary: no new tokens ({kind}): it has those of the training texts")
        return info, weights, 0
    if weights is not None:
        _set_biases(weights["text_head.bias"], added, _shares(Texts(info), words, len(texts)))
    print(f"vocabulary: {added} new tokens ({kind}), {old_size + added} in all")
    return info, weights, added


def _set_biases(bias: torch.Tensor, added: int, shares: torch.Tensor) -> None:
    """Sets the biases (V,) of the last `added` tokens, so that these have their `shares` (V,) of a
    training text and the old tokens together the rest.

    The training texts consist mostly of new tokens. With biases like the old ones, the head would
    give each of them the probability of an average token, and the first text loss would be above
    ln(V), a uniform guess."""
    relative = shares[-added:] / shares[:-added].sum()
    bias[-added:] = bias[:-added].logsumexp(0) + relative.log().to(bias)


@torch.no_grad()
def fit_new_tokens(model, added: int, forward: Callable[[], object]) -> None:
    """Shifts the biases of the last `added` tokens of a GPT's text head by how much the old logits
    exceed the old biases in `forward()`, a forward pass of the model: the probability of the new
    tokens becomes what their biases ask for."""
    levels = []

    def note(head, inputs, logits: torch.Tensor) -> None:
        levels.append(logits[:, :-added].double().logsumexp(1).cpu())

    hook = model.text_head.register_forward_hook(note)
    try:
        model.eval()
        forward()
    finally:
        hook.remove()
    bias = model.text_head.bias
    bias[-added:] += float(torch.cat(levels).mean() - bias[:-added].double().cpu().logsumexp(0))


def _count_words(texts: Iterable[str]) -> Counter[str]:
    """The frequencies of the words, and of the spaces between them."""
    words = Counter()
    for text in texts:
        parts = text.split(" ")
        words.update(parts)
        words[" "] += len(parts) - 1
    return words


def _is_learned(character: str) -> bool:
    """Whether a character can become a token: small letters, marks, and the marks of a script that
    end sentences. Coqui's code never lets a capital or a double quote reach the model."""
    if ord(character) in VARIANTS:  # of emoji
        return False
    kind = unicodedata.category(character)
    is_own_mark = kind == "Po" and ord(character) in OWN_MARKS
    return kind in ("Ll", "Lo", "Lm", "Mn", "Mc") or is_own_mark


def _runs(words: Counter[str]) -> Counter[str]:
    """The frequencies of the runs of letters and marks of a script that no language of Coqui has.
    Merges of these change no text without such letters."""
    runs = Counter()
    for word, count in words.items():
        for is_other, run in itertools.groupby(word, _is_of_other_script):
            if is_other:
                runs["".join(run)] += count
    return runs


@functools.cache
def _is_of_other_script(character: str) -> bool:
    script = unicodedata.name(character, "").split(" ")[0]  # such as ETHIOPIC, LATIN
    return unicodedata.category(character)[0] in "LM" and script not in SCRIPTS


def _shares(reader: Texts, words: Counter[str], count: int) -> torch.Tensor:
    """The share (V,) of each token in all tokens of `count` texts with these words, with prefixes
    and STOP. Each token is counted once more than it occurs, so that no share is 0."""
    vocabulary = reader.vocabulary
    prefix = reader.encode("")
    tally = [1] * vocabulary.size
    for word, number in words.items():
        for token in vocabulary.encode(word, reader.language)[1:]:
            tally[token] += number
    for token in (*prefix, vocabulary.stop):
        tally[token] += count
    return torch.tensor(tally, dtype=torch.float64) / sum(tally)


def _with_rows(info, weights: Weights, seed: int):
    """The info and weights with a row for each token that the configuration does not count yet."""
    old_size = info.config["text_tokens"]
    size = Vocabulary(info.vocab).size
    new = info.new_tokens + size - old_size
    if weights is not None:
        generator = torch.Generator().manual_seed(seed)
        weights = dict(weights)
        for name in TEXT_ROWS:
            rows = new_rows(weights[name], size - old_size, generator)
            weights[name] = torch.cat([weights[name], rows])
    return replace(info, config={**info.config, "text_tokens": size}, new_tokens=new), weights
