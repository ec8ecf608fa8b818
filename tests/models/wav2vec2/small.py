"""Tokenizers of characters, as omniASR and Hugging Face have them."""

import io

import sentencepiece


def sentencepiece_state(texts: list[str], **options) -> dict:
    """With omniASR's special ids."""
    model = io.BytesIO()
    settings = {
        "model_type": "char",
        "vocab_size": 1000,
        "hard_vocab_limit": False,
        "character_coverage": 1.0,
        "bos_id": 0,
        "pad_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        "minloglevel": 2,
        "num_threads": 1,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, **{**settings, **options}
    )
    return {"kind": "sentencepiece", "model": model.getvalue().hex()}


def characters_state(
    characters: str | list[str], unknown: int | None = 1, lower: bool = False
) -> dict:
    """With the blank <pad>, and the special tokens of transformers' tokenizer."""
    return {
        "kind": "characters",
        "pieces": ["<pad>", "<unk>", "<s>", "</s>", "|", *characters],
        "delimiter": "|",
        "blank": 0,
        "unknown": unknown,
        "lower": lower,
    }
