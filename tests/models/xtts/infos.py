"""Records of models for tests."""

from pathlib import Path

from models.xtts import formats, start, texts
from models.xtts.tokenizer import Vocabulary

FIXTURES = Path(__file__).parents[2] / "fixtures" / "xtts"
VOCAB = (FIXTURES / "vocab.json").read_text(encoding="utf-8")


def make_info(vocab: str = VOCAB, language: str = "am", **text) -> start.ModelInfo:
    """The info of a model that reads as `text` says, the fields of a `TextOptions`."""
    return start.ModelInfo(
        stage="gpt",
        config={**formats.SIZES["demo"], "text_tokens": Vocabulary(vocab).size},
        vocab=vocab,
        language=language,
        carried=False,
        text=texts.TextOptions(**text),
        reads_stop=False,
        condition="same",
        slice=start.SLICES["full"],
        pretrained=True,
        settings={},
        licence=False,
        model_dir=None,
        dvae="",
    )
