"""The wav2vec 2.0 recipe: exactness of training, data, and its command line on tiny models."""

import functools
import os
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import pytest
import soundfile
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from transformers import HubertForCTC, Wav2Vec2ForCTC, Wav2Vec2Model

from common import checkpoint
from common.device import Setup
from common.loop import Run
from models import model_files
from models.wav2vec2 import formats, settings, start, texts, vocabulary
from models.wav2vec2.model import Wav2Vec2
from models.wav2vec2.tokenizer import SPACE
from recipes import wav2vec2_ctc as recipe
from speech.data.columns import Corpus
from speech.data.loading import Checks, load_corpus
from speech.signal.audio import SAMPLE_RATE
from speech.writing import text
from tests import contract
from tests.models.wav2vec2.small import sentencepiece_state
from tests.models.wav2vec2.test_formats import (
    GROUP,
    LAYER,
    PIECES,
    as_fairseq2,
    change_json,
    mms,
    peer,
    saved,
    write_json,
)
from tests.recipes import adapters, runs
from tests.recipes.runs import SHORT, newest, ran, refused

moved = functools.partial(contract.moved, recipe)
TEXTS = ("Ab é", "ba.", "é, ab", "bé", "a b a", "ééb", "b", "aB")
SECONDS = (0.9, 0.5, 1.2, 0.7, 1.0, 0.6, 0.8, 1.1)
TINY = settings.make_config(
    32, 2, 4, conv_dim=[8] * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4
)


@pytest.fixture(autouse=True, scope="module")
def tiny():
    """Sizes of two layers of 32; masks of channels are narrower than these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings.SIZES, "demo", TINY)
        patch.setattr(recipe, "CHANNEL_SPAN", 4)
        yield


def write_noise(folder: Path, texts: tuple[str, ...]) -> str:
    """The manifest of utterances of noise."""
    return runs.write_noise(folder, texts, SECONDS[: len(texts)], SAMPLE_RATE)


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> list[str]:
    """The flags of eight utterances to train on and of three to evaluate."""
    places = [tmp_path_factory.mktemp(name) for name in ("train", "val")]
    train, val = map(write_noise, places, (TEXTS, TEXTS[:3]))
    return ["--train_manifest", train, "--val_manifest", val]


def write_released(folder: Path, kind=Wav2Vec2ForCTC, **changes) -> Path:
    model = peer(kind, **changes)
    if kind is Wav2Vec2ForCTC:
        model.lm_head.bias.data[PIECES.index("[PAD]")] -= 1  # so that it writes something
        model.lm_head.bias.data[PIECES.index("[UNK]")] -= 100
    saved(folder, model)
    normal = {"do_normalize": True, "sampling_rate": SAMPLE_RATE}
    write_json(folder / "preprocessor_config.json", normal)
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    return write_released(tmp_path_factory.mktemp("hf"), **LAYER)


@pytest.fixture(scope="module")
def unsupervised(tmp_path_factory) -> Path:
    return write_released(tmp_path_factory.mktemp("ssl"), Wav2Vec2Model, **LAYER)


# --- exactness ------------------------------------------------------------------------------------


def corpus_of(noise: list[str], info: start.ModelInfo) -> Corpus:
    prepare = functools.partial(texts.prepare, style=info.read_style())
    return load_corpus(noise[1], prepare, Checks())[0]


def utterances(noise: list[str], folder: Path, *flags, training: bool = True) -> tuple:
    """The training set as main reads it, and the info and the weights of the model."""
    args = runs.parse(recipe, *noise, "--model_dir", folder, *flags)
    asked = recipe.resolve(args)
    info, weights = start.Family(asked).read(str(folder))
    corpus = corpus_of(noise, info)
    data = recipe.Utterances(asked, corpus, start.tokenizer_of(info), info, training)
    return data, info, weights


def model_of(info: start.ModelInfo, weights: dict) -> Wav2Vec2:
    return model_files.with_weights(lambda: Wav2Vec2(info.config), weights)


def make_items(noise: list[str], folder: Path, *flags) -> tuple:
    """The eight utterances in float64, with masks and skipped layers, and the model."""
    shares = ["--mask_time", "0.3", "--mask_channels", "0.3", "--layer_drop", "0.4"]
    data, info, weights = utterances(noise, folder, *shares, *flags)
    items = [data.item(index, 1) for index in range(len(data))]
    for item in items:
        item["audio"] = item["audio"].double()
    assert len({tuple(item["layers"].tolist()) for item in items}) > 2
    for key in ("time_masks", "channel_masks"):
        assert any(item[key].any() for item in items)
    return items, info, model_of(info, weights).double()


def test_however_a_global_batch_is_cut_its_gradient_is_the_same(noise, tmp_path, monkeypatch):
    """Also with the group norm of other models, and if the loss is computed again in backward,
    utterance by utterance."""
    items, _, model = make_items(noise, write_released(tmp_path, **GROUP))
    given = contract.loss_of(recipe, model.train(), items, recipe.LOSS_WEIGHTS)
    contract.check_any_cut(given)
    contract.update(given, model, [7])
    whole = contract.gradient(model)
    monkeypatch.setattr(recipe, "AT_ONCE", 1)
    contract.check_any_cut(given)
    contract.update(given, model, [7])
    assert (contract.gradient(model) - whole).norm() <= 1e-10 * whole.norm()


@torch.no_grad()
@pytest.mark.parametrize("at_once", [recipe.AT_ONCE, 1])
def test_the_loss_is_that_of_the_logits_of_transformers(noise, released, monkeypatch, at_once):
    monkeypatch.setattr(recipe, "AT_ONCE", at_once)
    data, info, weights = utterances(noise, released, training=False)
    items = [data.item(index, 0) for index in range(len(data))]
    found = recipe.compute_loss(model_of(info, weights).eval(), moved(items))["ctc"]
    theirs = Wav2Vec2ForCTC.from_pretrained(released).eval()
    expected = 0.0
    for item in items:
        audio = F.layer_norm(item["audio"], item["audio"].shape, eps=1e-7)
        log_probs = theirs(audio[None]).logits[0].log_softmax(-1)
        lengths = [len(log_probs)], [len(item["tokens"])]
        expected += F.ctc_loss(log_probs, item["tokens"], *lengths, blank=4, reduction="sum")
    assert found.item() == pytest.approx(float(expected), rel=1e-4)


# --- data -----------------------------------------------------------------------------------------


def test_usual_masks_go_with_the_start(noise, released, unsupervised):
    """A new head on a self-supervised encoder learns with more of them."""
    kept, _, _ = utterances(noise, released)
    args = runs.parse(recipe, *noise, "--model_dir", unsupervised)
    asked = recipe.resolve(args)
    family = start.Family(asked)
    written = corpus_of(noise, family.read(str(unsupervised))[0]).texts
    info, _ = family.first_model(Run(Setup()), lambda info: written)
    new = recipe.Utterances(asked, corpus_of(noise, info), start.tokenizer_of(info), info, True)
    assert (kept.masks, new.masks) == (start.KEPT_HEAD_MASKS, start.NEW_HEAD_MASKS)
    assert info.has_new_head and kept.layer_drop == new.layer_drop == start.LAYER_DROP


def test_what_cannot_be_trained_on_is_left_out(noise, released, tmp_path, capsys):
    data, info, _ = utterances(noise, released)
    path = write_noise(tmp_path, ("ab", "ab" * 40, "xyz", "abx"))
    corpus, _ = load_corpus(path, text.normalise, Checks())
    tokenizer = start.tokenizer_of(info)
    kept = recipe.drop_untrainable(
        data.asked, {"train": corpus, "val": corpus}, info.config, tokenizer
    )
    assert list(kept["train"].texts) == ["ab", "abx"] and kept["val"] is corpus
    out = capsys.readouterr().out
    assert out.count("a frame a token") == 2 and "outside the vocabulary" in out
    assert "val set: 1 noted" in out and "in no CTC loss" in out
    held_out = recipe.Utterances(data.asked, corpus, tokenizer, info, training=False)
    batch = recipe.collate([held_out.item(index, 0) for index in (0, 1)])
    assert batch["counts"] == {"ctc": 2} and batch["tokens_lengths"].tolist() == [2, 80]


# --- runs -----------------------------------------------------------------------------------------

STEPS = "--max_steps 6 --save_every 1 --eval_every 3 --keep_last 9 --batch_size 2".split()
STEPS += "--gradient_accumulation_steps 2 --log_every 1".split()


def weights_after(folder: Path, step: int) -> dict[str, torch.Tensor]:
    file = folder / "checkpoints" / f"checkpoint_step_{step:08d}.pt"
    return checkpoint.read(file, recipe.RECIPE).model


def same(one: dict, other: dict, names) -> set[bool]:
    return {torch.equal(one[name], other[name]) for name in names}


def test_a_released_model_is_tuned_compared_and_exported(noise, released, tmp_path):
    flags = [*noise, "--model_dir", released, *SHORT, "--learning_rate", "1e-2"]
    out = ran(recipe, *flags, "--output_dir", tmp_path, "--export", tmp_path / "hf")
    assert "texts are prepared as the model writes" in out and "new vocabulary" not in out
    assert "are changed before they are used; left out or replaced: " in out
    assert f"compared to {released}" in out
    state = newest(tmp_path, recipe)
    before = start.formats.read_model(released)[0]
    extractor = [name for name in before if name.startswith("feature_extractor.")]
    assert same(state.model, before, extractor) == {True}
    assert same(state.model, before, vocabulary.ROWS) == {False}
    theirs = Wav2Vec2ForCTC.from_pretrained(tmp_path / "hf").state_dict()
    best = load_file(tmp_path / "checkpoints" / "best.safetensors")
    assert torch.equal(theirs["lm_head.weight"], best["lm_head.weight"])
    assert (tmp_path / "hf" / "README.md").is_file()


@pytest.fixture(scope="module")
def new_head(noise, unsupervised, tmp_path_factory) -> tuple[Path, str]:
    """The folder and the stdout of six updates of a self-supervised model, with a warm-up of
    four."""
    folder = tmp_path_factory.mktemp("new_head")
    steps = ["--warmup_steps", "4", "--learning_rate", "1e-4", *STEPS]
    flags = [*noise, "--model_dir", unsupervised, *steps, "--gradient_checkpointing"]
    return folder, ran(recipe, *flags, "--output_dir", folder)


def test_a_new_head_learns_at_its_own_rate(new_head, unsupervised):
    folder, out = new_head
    assert "new vocabulary: 10 pieces; the model had none" in out  # texts as they are written
    assert "compared to" not in out
    before = formats.read_model(unsupervised)[0]
    for name in vocabulary.ROWS:
        del before[name]  # they have no rows
    first, after = weights_after(folder, 1), weights_after(folder, 6)
    # Nothing is masked as long as the model cannot write.
    frozen = {name for name in before if name.startswith(("feature_extractor.", "masked_spec"))}
    assert same(after, before, before.keys() - frozen) == {False}
    assert same(after, before, frozen) == {True}
    # The steps of AdamW are as large as the rate: that of the warm-up, and that of the new rows.
    second = weights_after(folder, 2)
    rate = 1e-4 * 2 / 4
    moved = {name: (second[name] - first[name]).abs().max().item() for name in first}
    assert moved["lm_head.bias"] == pytest.approx(10 * rate, rel=0.5)
    learned = before.keys() - frozen
    assert max(moved[name] for name in learned) == pytest.approx(rate, rel=0.5)


def test_weights_of_a_run_fit_another_vocabulary_by_character(new_head, unsupervised, tmp_path):
    """A model from scratch has the weights of an earlier run with rows at other places."""
    folder = tmp_path / "texts"
    folder.mkdir()
    train = write_noise(folder, ("aaé", "bba", "0ab", "éb0"))
    flags = ["--train_manifest", train, "--val_manifest", train, "--keep_text", "--vocab", "own"]
    best = new_head[0] / "checkpoints" / "best.safetensors"
    flags += ["--model_dir", unsupervised, "--init_from", best]
    few = ["--max_steps", "1", "--batch_size", "2", "--learning_rate", "1e-30", "--save_every", "1"]
    ran(recipe, *flags, *few, "--output_dir", tmp_path / "run")
    before, after = checkpoint.read_weights(best, recipe.RECIPE), newest(tmp_path / "run", recipe)
    old, new = (each.model_info["tokenizer"]["pieces"] for each in (before, after))
    special = ["<pad>", "<unk>", SPACE]
    assert old == [*special, *",.ABabé"] and new == [*special, *"0abé"]
    both = [piece for piece in old if piece in new]
    for name in vocabulary.ROWS:
        rows = [each.index for each in (new, old)]
        kept, theirs = ([row(piece) for piece in both] for row in rows)
        assert torch.equal(after.model[name][kept], before.model[name][theirs])
    name = "encoder.layers.0.attention.q_proj.weight"
    assert torch.equal(after.model[name], before.model[name])


def test_added_characters_and_texts_that_are_kept(noise, released, tmp_path):
    flags = [*noise, "--model_dir", released, *SHORT, "--output_dir", tmp_path]
    _, err = refused(recipe, *flags, "--keep_text")
    assert "cannot write" in err and "--vocab extended" in err
    out = ran(recipe, *flags, "--keep_text", "--vocab", "extended")
    assert "rows of 6 are the released model's, 4 are new" in out and "texts: " not in out
    info = newest(tmp_path, recipe).model_info
    assert sorted(info["tokenizer"]["pieces"][6:]) == sorted(",.AB")
    assert info["new_pieces"] == [6, 7, 8, 9] and info["style"] == {}
    ran(recipe, *flags, "--keep_text", "--resume", "auto", "--max_steps", "3")
    _, err = refused(recipe, *flags, "--vocab", "extended")
    assert "has all characters" in err


@pytest.mark.slow
def test_ranks_that_share_a_model_wait_for_no_skipped_layer(noise, released, tmp_path):
    """Each rank has one utterance, so most updates have a layer that only one of them goes
    through."""
    flags = [*noise, "--model_dir", released, *SHORT, "--batch_size", "1", "--layer_drop", "0.5"]
    flags += ["--max_steps", "3", "--dropout", "0", "--learning_rate", "1e-3"]
    ran(recipe, *flags, "--gradient_accumulation_steps", "2", "--output_dir", tmp_path / "one")
    (tmp_path / "two").mkdir()
    command = runs.command(recipe, *flags, "--sharded", "--dataloader_num_workers", "0")
    ranks = runs.start_ranks(command, tmp_path / "two")
    errors = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    one, two = (newest(tmp_path / name, recipe).model for name in ("one", "two"))
    before = formats.read_model(released)[0]
    for name, weight in one.items():
        moved = (weight - before[name]).norm()
        if not name.endswith("k_proj.bias"):  # whose gradient is nothing but roundings
            assert (two[name] - weight).norm() <= 0.05 * moved, name


# --- omniASR and MMS ------------------------------------------------------------------------------


@pytest.fixture
def omni(tmp_path, monkeypatch) -> Path:
    """A file as omniASR's, with its tokenizer beside it."""
    state = sentencepiece_state(["ab é"])
    rows = 8
    config = {**TINY, "num_attention_heads": 4, "vocabulary": 0}
    monkeypatch.setitem(settings.OMNI, "tiny", config)
    monkeypatch.setitem(settings.TOKENIZERS, rows, "tiny.model")
    (tmp_path / "tiny.model").write_bytes(bytes.fromhex(state["model"]))
    shape = {"intermediate_size": 128, "vocab_size": rows, "pad_token_id": 0}
    content = as_fairseq2(peer(Wav2Vec2ForCTC, **LAYER, **shape).state_dict())
    del content["masker.temporal_mask_embed"]
    torch.save({"model": content}, tmp_path / "omniASR-CTC-300M.pt")
    return tmp_path / "omniASR-CTC-300M.pt"


def test_a_file_of_omniasr_is_tuned_transcribes_and_is_exported(noise, omni, tmp_path):
    flags = [*noise, "--model_file", omni, *SHORT, "--output_dir", tmp_path / "run"]
    out = ran(recipe, *flags, "--export", tmp_path / "hf")
    assert "learning rate 1e-05" in out and f"compared to {omni}" in out
    card = yaml.safe_load((tmp_path / "hf" / "README.md").read_text().split("---\n")[1])
    assert card["base_model"] == "facebook/omniASR-CTC-300M" and card["license"] == "apache-2.0"
    audio = Path(noise[1]).parent / "0.wav"
    for place in (["--model_file", omni], ["--model_dir", tmp_path / "hf"]):
        assert ran(recipe, "--transcribe", audio, *place, "--output_dir", tmp_path / "x")
    best = tmp_path / "run" / "checkpoints" / "best.safetensors"
    texts = [
        ran(recipe, "--transcribe", audio, *place, "--output_dir", tmp_path / "x")
        for place in (["--resume", best], ["--model_dir", tmp_path / "hf"])
    ]
    assert texts[0] == texts[1]


def test_a_language_of_mms_is_tuned_and_stays_non_commercial(noise, tmp_path):
    folder = mms(tmp_path)
    flags = ["--model_dir", folder, *SHORT, "--output_dir", tmp_path / "run"]
    out = ran(recipe, *noise, *flags, "--language", "deu", "--export", tmp_path / "out")
    assert "cc-by-nc-4.0, for non-commercial use only" in out
    card = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---\n")[1])
    assert card["license"] == "cc-by-nc-4.0"
    assert newest(tmp_path / "run", recipe).model_info["language"] == "deu"
    _, err = refused(recipe, *noise, *flags, "--language", "vie")
    assert "for: deu, amh" in err
    change_json(folder / "tokenizer_config.json", pad_token="<pad>", unk_token="<unk>")  # amh's
    _, err = refused(recipe, *noise, *flags, "--language", "amh", "--resume", "auto")
    assert "in amh (the checkpoint's model is of --language deu)" in err


# --- used without training, adapters and plans ----------------------------------------------------


def test_a_released_model_transcribes_and_says_where_it_is_unsure(noise, released, tmp_path):
    audio = Path(noise[1]).parent
    files = [audio / "0.wav", audio / "2.wav"]
    flags = ["--model_dir", released, "--output", tmp_path / "out.jsonl"]
    ran(recipe, "--transcribe", *files, *flags)
    rows = runs.rows(tmp_path / "out.jsonl")
    theirs = Wav2Vec2ForCTC.from_pretrained(released).eval()
    tokenizer = start.make_tokenizer(formats.read_model(released)[2]["tokenizer"], len(PIECES))
    for file, row in zip(files, rows, strict=True):
        audio = torch.from_numpy(soundfile.read(file)[0]).float()
        audio = F.layer_norm(audio, audio.shape, eps=1e-7)
        with torch.no_grad():
            best = theirs(audio[None]).logits[0].argmax(-1).unique_consecutive()
        assert row["text"] == tokenizer.decode(best.tolist()) and row["text"]
        assert " ".join(word["text"] for word in row["words"]) == row["text"]
        for word in row["words"]:
            assert 0 < word["confidence"] <= 1 and 0 <= word["start"] < word["end"]


def test_align_hears_what_transformers_does(noise, released, tmp_path):
    (tmp_path / "book.txt").write_text("ab é", encoding="utf-8")
    audio = Path(noise[1]).parent / "0.wav"
    words = ["--align", audio, tmp_path / "book.txt", "--output", tmp_path / "a.json"]
    args = runs.parse(recipe, *words, "--model_dir", released)
    heard_by = recipe.recogniser_to_align(recipe.resolve(args), Setup())
    waveform = torch.randn(SAMPLE_RATE, generator=torch.Generator().manual_seed(0))
    normal = F.layer_norm(waveform, waveform.shape, eps=1e-7)
    with torch.no_grad():
        found = torch.from_numpy(heard_by.hear(waveform))
        theirs = Wav2Vec2ForCTC.from_pretrained(released).eval()(normal[None]).logits[0]
    torch.testing.assert_close(found, theirs.log_softmax(-1), atol=1e-4, rtol=1e-4)
    assert heard_by.vocabulary.blank == PIECES.index("[PAD]")
    assert [heard_by.vocabulary.spellings[n] for n in (0, 1, 5)] == [" ", "a", "é"]
    assert round(1 / heard_by.frame) == 50 and heard_by.longest == recipe.READS_SECONDS


def test_a_self_supervised_model_writes_nothing_yet(noise, unsupervised):
    audio = Path(noise[1]).parent / "0.wav"
    _, err = refused(recipe, "--transcribe", audio, "--model_dir", unsupervised)
    assert "self-supervised" in err and "--train_manifest" in err


def assert_same_in_peft(kind, base: list, merged: Path, folder: Path) -> None:
    """Stock peft and transformers compute what the merged model does, and the base does not."""
    plain = kind.from_pretrained(base[1]).eval()
    audio = torch.randn(1, 9000)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of missing keys
        before = plain(audio).logits
        found = peft.PeftModel.from_pretrained(plain, folder).eval()(audio).logits
        expected = kind.from_pretrained(merged).eval()(audio).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, expected, atol=1e-3)


@pytest.mark.slow
def test_adapters_beside_a_released_model(noise, released, tmp_path):
    in_peft = functools.partial(assert_same_in_peft, Wav2Vec2ForCTC)
    out = adapters.check(
        recipe, noise, ["--model_dir", released], tmp_path, formats, in_peft=in_peft
    )
    assert "trained whole: lm_head" in out


def test_adapters_beside_a_hubert(noise, tmp_path):
    """Its model has another name in transformers, also where it computes what wav2vec 2.0 does."""
    base = ["--model_dir", write_released(tmp_path / "base", HubertForCTC, **LAYER)]
    saved = ["--resume", tmp_path / "run" / "checkpoints" / "checkpoint_step_00000002.pt"]
    merged, folder = tmp_path / "merged", tmp_path / "peft"
    flags = [*SHORT, "--learning_rate", "1e-2", "--lora", "3", "--output_dir", tmp_path / "run"]
    ran(recipe, *noise, *base, *flags)
    ran(recipe, *base, *saved, "--export", merged, "--export_adapter", folder)
    assert_same_in_peft(HubertForCTC, base, merged, folder)


def test_adapters_in_fp16_beside_convolutions_in_fp32(noise, released, tmp_path):
    flags = [*noise, "--model_dir", released, *SHORT, "--lora", "2", "--mixed_precision", "fp16"]
    ran(recipe, *flags, "--output_dir", tmp_path)
    assert newest(tmp_path, recipe).progress.step == 2
