"""The folder of --export, which Coqui's XTTS loads: weights, voices, card."""

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from common import device
from common.parts import lora
from models import card
from models.xtts import cleaners, formats, speaking
from models.xtts.speaking import Synthesiser
from models.xtts.start import Family, ModelInfo, XttsOptions

CARD = card.Form(
    library="coqui",
    task=card.SYNTHESIS,
    family="XTTS-v2",
    use="""
from TTS.tts.configs.xtts_config import XttsConfig
from TTS.tts.models.xtts import Xtts

config = XttsConfig()
config.load_json("FOLDER/config.json")
model = Xtts.init_from_config(config)
model.load_checkpoint(config, checkpoint_dir="FOLDER")
latents, speaker = model.get_conditioning_latents(
    ["voice.wav"],
    max_ref_length=config.max_ref_len,
    gpt_cond_len=config.gpt_cond_len,
    gpt_cond_chunk_len=config.gpt_cond_chunk_len,
)
wav = model.inference("TEXT", "LANGUAGE", latents, speaker)["wav"]  # 24 kHz
""",
)


def export(
    asked: XttsOptions,
    setup: device.Setup,
    info: ModelInfo,
    synthesiser: Synthesiser,
    clips: dict[str, np.ndarray],
    about: card.About,
) -> None:
    """--export, with the voices of --speaker_wav and then those in `clips`, of
    `speaking.speakers_of`, that have other names."""
    folder = asked.origin.export
    if not folder:
        return
    parts = synthesiser.frozen.to(setup.device)
    named = speaking.named_clips(asked.voices)
    has_adapters = lora.adapters_of(synthesiser.model)  # beside weights in 16 bits
    with setup.autocast() if has_adapters else contextlib.nullcontext():
        speakers = {
            name: (clip, speaking.voice_of_clip(synthesiser, clip))
            for name, clip in (named | clips | named).items()
        }
    groups = {"gpt": Family(asked).trained_weights(synthesiser.model), **parts.groups()}
    extras = {"config": info.settings, "vocab": info.vocab, "licence": info.licence}
    about = replace(
        about,
        base=about.base or info.model_dir,
        languages=tuple(about.languages or (info.language,)),
        licence=card.CPML if info.licence else None,
    )
    # Coqui's code refuses a language that it does not know, and reads a token in the text.
    is_known = info.language in cleaners.LANGUAGES
    use = CARD.use.replace("LANGUAGE", info.language if is_known else "en")
    use = use.replace("TEXT", "TEXT" if is_known else f"[{info.language}]TEXT")
    text = card.readme(Path(folder).resolve().name, about, replace(CARD, use=use))
    names = formats.export(folder, groups, info.config, extras, speakers, text)
    print(f"exported to {folder}: {', '.join(names)}")
