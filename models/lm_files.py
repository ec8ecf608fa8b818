"""The language model of a recogniser for other programs: an ARPA file beside an export, and how its
model card says to use it."""

from dataclasses import dataclass, replace
from pathlib import Path

from models import card
from speech.decoding import arpa, language_model
from speech.decoding.language_model import LanguageModelFlags, Tokens
from speech.decoding.ngram import LM_WEIGHT, NGram

ARPA = "lm.arpa"
ORDER = 6  # of its n-grams: kenlm, as it is published, reads no longer ones
TOKENS = "lm_tokens.txt"  # the names of a model's outputs in order, for torchaudio
NEMO_OFFSET = 100  # of NeMo's names of tokens, which are single characters
SPACE = "|"
SPECIAL = ("<s>", "</s>", "<unk>")  # which mean something else in an ARPA file
LOG_10 = 2.3  # torchaudio weighs decimal logarithms
NEMO = """
from nemo.collections.asr.models import ASRModel
from omegaconf import open_dict

model = ASRModel.restore_from("FOLDER/model.nemo")
decoding = model.cfg.decoding
with open_dict(decoding):
    decoding.strategy = "greedy_batch"
    decoding.greedy.ngram_lm_model = "FOLDER/lm.arpa"
    decoding.greedy.ngram_lm_alpha = 0.3
model.change_decoding_strategy(decoding)
print(model.transcribe(["recording.wav"]))
"""  # of a model card
TORCHAUDIO = """
from torchaudio.models.decoder import ctc_decoder  # it needs flashlight-text and kenlm

decoder = ctc_decoder(
    lexicon=None,
    tokens="FOLDER/lm_tokens.txt",
    lm="FOLDER/lm.arpa",
    lm_dict="FOLDER/lm_tokens.txt",  # in the order of tokens, which torchaudio does not keep
    lm_weight=WEIGHT,
    beam_size=32,
    blank_token="BLANK",
    sil_token="SILENCE",
)
tokens = decoder(log_probs)[0][0].tokens  # of log-probabilities (1, T, V) of this model
print("".join(decoder.idxs_to_tokens(tokens)).replace("|", " ").strip())
"""


@dataclass(frozen=True)
class Names:
    """How a program names the `tokens` that a language model counts: `names`, by id. `use`: the
    code of a model card. `lines`: those of TOKENS, if the program needs them."""

    tokens: Tokens
    names: dict[int, str]
    use: str
    lines: tuple[str, ...] = ()


def for_nemo(tokens: Tokens, size: int) -> Names:
    """NeMo's names. `size`: that of the tokenizer."""
    names = {token: chr(token + NEMO_OFFSET) for token in range(size)}
    return Names(tokens, names, NEMO)


def for_torchaudio(tokens: Tokens, pieces: list[str], blank: int) -> Names:
    """The names of the outputs of a CTC model. `pieces`: of all, with U+2581 for a space."""
    lines: list[str] = []
    taken = {""}
    for token, piece in enumerate(pieces):
        name = "".join(piece.split()).replace("\u2581", SPACE)
        if name in taken or (name == SPACE and token != tokens.mark):
            name = f"<{token}>"
        taken.add(name)
        lines.append(name)
    names = {
        token: name for token, name in enumerate(lines) if token != blank and name not in SPECIAL
    }
    use = TORCHAUDIO.replace("WEIGHT", f"{LM_WEIGHT * LOG_10:.1f}").replace("BLANK", lines[blank])
    silence = SPACE if SPACE in lines else lines[blank]
    return Names(tokens, names, use.replace("SILENCE", silence), tuple(lines))


def beside(
    weights: Path | None, named: Names, form: card.Form, flags: LanguageModelFlags
) -> tuple[dict[str, str], card.Form]:
    """Files for an export, texts by name, and the `form` of its card with their use: those of the
    language model of a run's `weights`. No files, and a line why, if it is not known to help
    them."""
    if weights is None or flags.lm == "off":
        return {}, form
    tokens = named.tokens
    lines = language_model.read_lines(weights.parent / language_model.TEXTS, tokens)
    helps = flags.lm == "on" or language_model.kept(weights.parent)
    reason = ""
    if not lines:
        reason = f"there is no {language_model.TEXTS} beside the weights"
    elif helps is None:
        reason = (
            f"whether {language_model.TEXTS} helps these weights is not known (--evaluate finds it"
            " out, or add --lm on)"
        )
    elif not helps:
        reason = "the language model did not help the held-out set (--lm on writes it)"
    if reason:
        print(f"{ARPA} is not exported: {reason}")
        return {}, form
    model = NGram(map(tokens.of, lines), tokens.size, tokens.mark, ORDER)
    texts = {ARPA: "".join(f"{line}\n" for line in arpa.lines_of(model, named.names))}
    if named.lines:
        texts[TOKENS] = "".join(f"{line}\n" for line in named.lines)
    return texts, replace(form, with_lm=named.use)
