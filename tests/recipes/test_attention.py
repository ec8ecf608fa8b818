"""The attention kernels that the recipes take on GPUs, with the shapes, strides and types that q,
k, v and the mask really have: none may take the math kernel, which keeps all scores."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dry_run import cuda_like
from dry_run.cuda_like import kernel_of
from models.matcha import model as matcha
from models.parakeet import settings as parakeet
from models.wav2vec2 import settings as wav2vec2
from models.whisper import formats as whisper
from models.xtts import formats as xtts
from models.xtts.decoding import GREEDY, sample
from models.xtts.model import make_model
from recipes import (
    konkani_conformer,
    matcha_voice,
    parakeet_tdt,
    wav2vec2_ctc,
    whisper_vietnamese,
    xtts_amharic,
)
from speech.signal.audio import SAMPLE_RATE
from tests.models.xtts import small
from tests.recipes import runs
from tests.recipes.runs import run

# Compute capabilities, and the types that a recipe computes in there.
GPUS = {(7, 5): (torch.float16, torch.float32)}
for newer in ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0)):
    GPUS[newer] = (torch.bfloat16, torch.float16, torch.float32)
RECIPES = {
    konkani_conformer: ["--encoder_layers", "1", "--decoder_layers", "1"],
    whisper_vietnamese: ["--model_size", "tiny", "--from_scratch"],
    parakeet_tdt: ["--model_size", "110m", "--from_scratch"],
    wav2vec2_ctc: ["--model_size", "300m", "--from_scratch"],
    matcha_voice: ["--model_size", "demo"],
    xtts_amharic: [],
}
# Heads of 36 values suit no fused kernel in 16 bits; the demo's clips are of a second.
ODD_HEADS = {"parakeet demo", "wav2vec2 demo"}


def like(x: torch.Tensor | None, dtype: torch.dtype, device: str = "meta") -> torch.Tensor | None:
    """A tensor of the same shape and strides and, unless it is boolean, of another type."""
    if x is None:
        return None
    dtype = x.dtype if x.dtype is torch.bool else dtype
    made = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
    return made.requires_grad_(x.requires_grad)


class Calls(dict):
    """The calls of attention (q, k, v, mask, dropout, causal), each different one once."""

    def note(self, q, k, v, mask, dropout: float, causal: bool) -> None:
        tensors = [like(x, torch.float32) for x in (q, k, v, mask)]
        shapes = [x is not None and (x.shape, x.stride()) for x in tensors]
        self[str((shapes, dropout, causal))] = (*tensors, dropout, causal)

    def require_fused(self) -> None:
        """Each takes a fused kernel, on every GPU and in every type. Torch says so, too, for the
        CPU, which has the same rule of strides."""
        assert self
        for *tensors, dropout, causal in self.values():
            strides = [x is not None and x.stride() for x in tensors]
            for capability, dtypes in GPUS.items():
                for dtype in dtypes:
                    given = [like(x, dtype) for x in tensors]
                    kernel = kernel_of(*given, dropout, causal, capability)
                    assert kernel != "math", (capability, dtype, strides)
            given = [like(x if x is None else x.detach(), torch.float32, "cpu") for x in tensors]
            assert torch._fused_sdp_choice(*given, 0.0, causal) == 1, strides


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> str:
    """Utterances of noise that differ in length, so that batches have padding and masks."""
    texts = [f"words {number}" for number in range(6)]
    seconds = [1 + number / 4 for number in range(6)]
    return runs.write_noise(tmp_path_factory.mktemp("noise"), texts, seconds, SAMPLE_RATE)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.RECIPE)
def test_training_and_evaluation(recipe, manifest, tmp_path, monkeypatch):
    """All that a plan runs."""
    calls = Calls()

    def note(*arguments) -> str:
        calls.note(*arguments[:-1])
        return kernel_of(*arguments)

    monkeypatch.setattr(cuda_like, "kernel_of", note)
    monkeypatch.setattr(xtts, "RELEASED", {**xtts.RELEASED, "layers": 1})
    monkeypatch.chdir(tmp_path)
    few = ["--batch_size", "4", "--gradient_accumulation_steps", "1", "--dry_run", "A100-80GB"]
    status, _, err = run(recipe, *RECIPES[recipe], "--train_manifest", manifest, *few)
    assert status == 0, err
    calls.require_fused()
    if recipe is not xtts_amharic:  # whose padding follows all that attends
        assert any(mask is not None for *_, mask, _, _ in calls.values())


def test_speaking():
    """Sentences of different lengths have padding in the cache of keys and values."""
    calls = Calls()

    class Watched(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            named = kwargs or {}
            if function is F.scaled_dot_product_attention:
                q, k, v = args
                mask, causal = named.get("attn_mask"), named.get("is_causal", False)
                calls.note(q, k, v, mask, named.get("dropout_p", 0.0), causal)
            return function(*args, **named)

    config = small.CONFIG
    model = make_model(config).eval()
    with Watched(), torch.no_grad():
        voice = model.condition(torch.randn(1, config["mel_channels"], 60))
        few = replace(GREEDY, max_codes=4)
        sample(model, config, voice, [[1, 2, 3], [4, 5, 6, 7, 8]], few)
    calls.require_fused()
    assert any(mask is not None for *_, mask, _, _ in calls.values())


def test_the_heads_of_every_size():
    """Fused kernels in 16 bits need heads of a multiple of 8 values below Ampere, and with a mask
    everywhere."""
    konkani = konkani_conformer.DEFAULTS
    heads = {"konkani": (konkani["d_model"], konkani["attention_heads"])}
    for name, config in parakeet.SIZES.items():
        heads[f"parakeet {name}"] = config["d_model"], config["heads"]
    for name, config in wav2vec2.SIZES.items():
        heads[f"wav2vec2 {name}"] = config["hidden_size"], config["num_attention_heads"]
    heads["xtts"] = xtts.RELEASED["d_model"], xtts.RELEASED["heads"]
    for name, config in whisper.SIZES.items():
        heads[f"whisper {name}"] = config["d_model"], config["encoder_attention_heads"]
    for name, config in matcha.SIZES.items():
        for speaker in (0, matcha.SPEAKER):
            heads[f"matcha {name}, {speaker}"] = config["width"] + speaker, config["heads"]
        heads[f"matcha {name}, decoder"] = config["decoder_head_dim"], 1
    odd = {name for name, (width, count) in heads.items() if width // count % 8}
    assert odd == ODD_HEADS
