"""Released checkpoints of Matcha-TTS (matcha_ljspeech.ckpt, matcha_vctk.ckpt)."""

from pathlib import Path

import torch

from common import checkpoint
from common.errors import UsageError
from models import model_files
from models.matcha.model import BANDS, SIZES, SPEAKER, Matcha

# The tokens of the released models: letters and phonetic signs. The texts of a new voice are
# written in letters, whose rows it takes from these.
RELEASED = (
    "_"
    ';:,.!?¡¿—…"«»“” '
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    "ɑɐɒæɓʙβɔɕçɗɖðʤəɘɚɛɜɝɞɟʄɡɠɢʛɦɧħɥʜɨɪʝɭɬɫɮʟɱɯɰŋɳɲɴøɵɸθœɶʘɹɺɾɻʀʁɽʂʃʈʧʉʊʋⱱʌɣɤʍχʎʏʑʐʒʔʡʕʢǀǁǂǃˈˌːˑʼʴʰʱʲʷ"
    "ˠˤ˞↓↑→↗↘'̩'ᵻ"
)
ROWS = "encoder.emb.weight"
SPEAKERS = "spk_emb.weight"
LICENCE = (
    "note: no licence of these weights was found in writing (the code is MIT): ask before you sell"
    " what is made of them"
)


class Name:
    """Stands for a class that a released file names, of which nothing is used."""

    def __init__(self, *values, **named):
        pass

    def __setstate__(self, state):
        pass


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    """The weights in a released checkpoint, a pickle of Lightning's. Its settings are objects of
    many classes, which names stand for: no code of theirs is run. Raises `UsageError`."""
    file = Path(path)
    model_files.refuse_pointer(file)
    content = checkpoint.load(file, Name)
    weights = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise UsageError(f"{path} holds no state_dict: it is not a checkpoint of Matcha-TTS")
    return model_files.floats(weights, file)


def read_model(path: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """The configuration and the weights of a released model. Raises `UsageError`."""
    weights = read_tensors(path)
    speakers = weights[SPEAKERS].numel() // SPEAKER if SPEAKERS in weights else 1
    for size in ("full", "large"):
        config = {**SIZES[size], "symbols": len(RELEASED), "speakers": speakers}
        final = weights.get("decoder.estimator.final_proj.weight")
        if final is not None and final.shape == (BANDS, config["channels"], 1):
            break
    expected = checkpoint.shapes_of(lambda: Matcha(config))
    model_files.check_shapes(weights, expected, path, "Matcha-TTS")
    deviation = weights["mel_std"]
    if not deviation.is_meta and not deviation > 0:
        raise UsageError(f"{path} is damaged: mel_std is {deviation:g}, and must be above 0")
    return config, weights


def adapted(
    config: dict, weights: dict[str, torch.Tensor], symbols: list[str], speakers: int
) -> tuple[dict, dict[str, torch.Tensor]]:
    """The configuration and the weights of a released model for other tokens and speakers. Letters
    that it knows keep their rows; other tokens, and all speakers, get new ones. Raises
    `UsageError` for several speakers if the model has one."""
    has_speakers = SPEAKERS in weights
    if speakers > 1 and not has_speakers:
        raise UsageError(
            "--model_file: this model has one speaker, and the training set several: take a model"
            " of several (matcha_vctk.ckpt), or the clips of one speaker"
        )
    config = {
        **config,
        "symbols": len(symbols),
        "speakers": max(2, speakers) if has_speakers else 1,
    }
    rows = weights[ROWS]
    new = torch.randn(len(symbols), rows.shape[1], device=rows.device) * rows.std()
    known = [number for number, symbol in enumerate(symbols) if symbol in RELEASED]
    new[known] = rows[[RELEASED.index(symbols[number]) for number in known]]
    changed = {ROWS: new}
    if has_speakers:
        table = weights[SPEAKERS]
        vectors = torch.randn(config["speakers"], SPEAKER, device=rows.device) * table.std()
        changed[SPEAKERS] = vectors + table.mean(0)
    print(f"{len(known)} of {len(symbols)} tokens are letters of the released model")
    return config, weights | changed
