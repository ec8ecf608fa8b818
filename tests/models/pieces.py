"""SentencePiece models for tests."""

import io
from collections.abc import Iterable

import sentencepiece


def train_pieces(lines: Iterable[str], **options) -> bytes:
    """Without pieces for the beginning and the end of a text, if `options` name none."""
    model = io.BytesIO()
    usual = {"bos_id": -1, "eos_id": -1, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **{**usual, **options}
    )
    return model.getvalue()
