"""Tokenizers of characters, as omniASR and Hugging Face have them."""

from tests.models.pieces import train_pieces


def sentencepiece_state(texts: list[str], **options) -> dict:
    """With omniASR's special ids."""
    ids = {"bos_id": 0, "pad_id": 1, "eos_id": 2, "unk_id": 3}
    how = {"model_type": "char", "vocab_size": 1000, "hard_vocab_limit": False}
    model = train_pieces(texts, **{"character_coverage": 1.0, **ids, **how, **options})
    return {"kind": "sentencepiece", "model": model.hex()}


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
