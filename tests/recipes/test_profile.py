"""--profile in the recognisers that make their own vocabulary: it travels with the weights, and what
they export is read by other programs."""

import json
from pathlib import Path

import onnx_asr
import pytest
import sherpa_onnx
from transformers import Wav2Vec2CTCTokenizer

from common import checkpoint
from models.wav2vec2 import settings
from models.wav2vec2.tokenizer import Wav2Vec2Tokenizer
from recipes import konkani_conformer, template, wav2vec2_ctc
from speech.writing import profile
from tests.recipes.runs import SHORT, TINY, ran, refused

WAV2VEC2 = settings.make_config(
    32, 2, 4, conv_dim=[8] * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4
)
MODELS = {
    konkani_conformer: TINY,
    template: [],
    wav2vec2_ctc: ["--from_scratch", "--model_size", "300m"],
}


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings.SIZES, "300m", WAV2VEC2)
        yield


@pytest.fixture(scope="module")
def letters(konkani, tmp_path_factory) -> Path:
    """A profile of the corpus, in which letters with their marks are one."""
    path = tmp_path_factory.mktemp("profile") / "p.tsv"
    lines = Path(konkani["train"]).read_text(encoding="utf-8").splitlines()
    path.write_text(profile.first_profile(json.loads(line)["text"] for line in lines), "utf-8")
    return path


@pytest.fixture(scope="module", params=MODELS, ids=lambda recipe: recipe.__name__[8:])
def trained(request, manifests, letters, tmp_path_factory):
    """A recipe, the folder of a short run with the profile, and its stdout."""
    folder = tmp_path_factory.mktemp("run")
    model = [*MODELS[request.param], "--profile", letters]
    return (
        request.param,
        folder,
        ran(request.param, *manifests, *SHORT, *model, "--output_dir", folder),
    )


def best_of(folder: Path) -> Path:
    return folder / "checkpoints" / "best.safetensors"


def info_of(recipe, folder: Path) -> dict:
    return checkpoint.read_weights(best_of(folder), recipe.RECIPE).model_info


def pieces_of(recipe, folder: Path) -> list[str]:
    info = info_of(recipe, folder)
    return info.get("characters") or info["tokenizer"]["pieces"]


def test_units_are_tokens_and_errors_are_counted_in_them(trained, letters):
    recipe, folder, out = trained
    units = profile.read(str(letters)).units
    assert max(map(len, units)) > 1
    assert set(units) <= set(pieces_of(recipe, folder))
    assert "\nUER " in out and f"--profile {letters}: columns used: Grapheme, Text" in out
    results = json.loads((folder / "logs" / "results.json").read_text(encoding="utf-8"))
    assert {"wer", "cer", "uer"} == set(next(iter(results["rates"].values())))


def test_a_run_resumes_and_is_used_without_the_flag(trained, konkani, manifests, letters, tmp_path):
    recipe, folder, _ = trained
    more = [*MODELS[recipe], *manifests, *SHORT, "--max_steps", 3, "--output_dir", folder]
    assert "\nUER " in ran(recipe, *more, "--resume", "auto")
    used = ["--resume", best_of(folder), "--output_dir", folder]
    assert "\nUER " in ran(recipe, "--evaluate", "--test_manifest", konkani["val"], *used)
    audio = next(Path(konkani["val"]).parent.rglob("*.wav"))
    ran(recipe, "--transcribe", audio, *used)
    other = tmp_path / "other.tsv"
    other.write_text("Grapheme\na\n", encoding="utf-8")
    _, said = refused(recipe, *more, "--resume", "auto", "--profile", other)
    assert "checkpoint" in said and "other units" in said


def test_konkani_is_read_by_sherpa_onnx_and_onnx_asr(trained, tmp_path):
    recipe, folder, _ = trained
    if recipe is not konkani_conformer:
        pytest.skip("another recipe")
    used = ["--resume", best_of(folder), "--output_dir", folder]
    ran(recipe, "--export", tmp_path / "onnx", *used)
    pieces = pieces_of(recipe, folder)
    lines = (tmp_path / "onnx" / "tokens.txt").read_text(encoding="utf-8").splitlines()
    assert {line.rsplit(" ", 1)[0] for line in lines} >= {*pieces} - {" "}
    sherpa_onnx.OfflineRecognizer.from_nemo_ctc(
        model=str(tmp_path / "onnx" / "model.onnx"), tokens=str(tmp_path / "onnx" / "tokens.txt")
    )
    onnx_asr.load_model("nemo-conformer-ctc", tmp_path / "onnx")


def test_transformers_writes_units(trained, letters, tmp_path):
    recipe, folder, _ = trained
    if recipe is not wav2vec2_ctc:
        pytest.skip("another recipe")
    used = ["--resume", best_of(folder), "--output_dir", folder]
    ran(recipe, "--export", tmp_path / "hf", *used)
    stock = Wav2Vec2CTCTokenizer.from_pretrained(tmp_path / "hf")
    tokenizer = Wav2Vec2Tokenizer(info_of(recipe, folder)["tokenizer"])
    words = " ".join(profile.read(str(letters)).units[:8])
    tokens = tokenizer.encode(words)
    assert tokenizer.unknown not in tokens
    path = [each for token in tokens for each in (token, tokenizer.blank)]  # as CTC writes it
    assert tokenizer.decode(tokens) == stock.decode(path) == words
