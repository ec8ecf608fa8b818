"""Whisper's files against transformers: read, export, load, generate; and files that are
refused."""

import json
import os
import pickle
import shutil
import zipfile

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import WhisperConfig, WhisperForConditionalGeneration

from common.errors import Failure, UsageError
from models.whisper import formats
from models.whisper import tokenizer as whisper_tokenizer
from tests.peers import same_tensors

SYMBOLS = whisper_tokenizer.train_symbols([*"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789É", "<SK>"], "en")
BPE = whisper_tokenizer.train_bpe(["xin chào các bạn", "tôi là sinh viên"] * 20, 300, "vi")


def timestamped() -> whisper_tokenizer.WhisperTokenizer:
    """A tokenizer with all languages and timestamps, as in the released models."""
    specials = whisper_tokenizer.special_tokens(
        len(BPE.vocab), whisper_tokenizer.LANGUAGES[:99], timestamps=True
    )
    return whisper_tokenizer.WhisperTokenizer(BPE.vocab, BPE.merges, specials, (), "vi")


FULL = timestamped()


def tiny(vocabulary: int, **changes) -> dict[str, int]:
    return {
        **formats.make_config(32, (1, 2), 2, vocabulary=vocabulary),
        "max_source_positions": 50,
        "max_target_positions": 24,
        **changes,
    }


def peer(config: dict, tokenizer=SYMBOLS, **settings):
    """transformers' own model with random weights."""
    torch.manual_seed(0)
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokenizer.eos)
    start = {"decoder_start_token_id": tokenizer.start}
    described = WhisperConfig(**config, **ids, **start, **settings)
    return WhisperForConditionalGeneration(described).eval()


def weights_of(model) -> dict[str, torch.Tensor]:
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in state.items() if name != "proj_out.weight"}


def exported(
    folder,
    tokenizer=SYMBOLS,
    padding: int = 0,
    changes: dict | None = None,
    base: dict | None = None,
):
    """Exports random weights and loads them with transformers."""
    config = tiny(tokenizer.size + padding, **(changes or {}))
    formats.export(folder, weights_of(peer(config, tokenizer)), config, tokenizer, base)
    return WhisperForConditionalGeneration.from_pretrained(folder).eval()


def generate(model, features: torch.Tensor, **options) -> tuple[list[list[int]], list[int]]:
    """The tokens that `generate` returns, and the prompt that it gave the decoder."""
    seen, forward = [], model.forward

    def spy(*args, **given):
        if given.get("decoder_input_ids") is not None:
            seen.append(given["decoder_input_ids"].tolist())
        return forward(*args, **given)

    model.forward = spy
    try:
        tokens = model.generate(features, **options).tolist()
    finally:
        model.forward = forward
    return tokens, seen[0][0]


def noise(folder, seconds: float = 1.0) -> torch.Tensor:
    processor = transformers.WhisperProcessor.from_pretrained(folder)
    samples = np.random.default_rng(0).normal(0, 0.1, round(seconds * 16_000)).astype("float32")
    return processor(samples, sampling_rate=16_000, return_tensors="pt").input_features


# --- the two forms --------------------------------------------------------------------------------


def test_expected_shapes_are_those_of_transformers():
    config = tiny(90, encoder_layers=2, decoder_layers=1, num_mel_bins=128, decoder_ffn_dim=48)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(peer(config)).items()}
    assert shapes == formats.expected_shapes(config)


MILLIONS = {
    "tiny": 37.8, "base": 72.6, "small": 241.7, "medium": 763.9,
    "large-v2": 1543.3, "large-v3": 1543.5, "turbo": 808.9,
}  # fmt: skip


@pytest.mark.parametrize("size", MILLIONS)
def test_sizes_have_the_released_numbers_of_parameters(size):
    shapes = formats.expected_shapes(formats.SIZES[size])
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    # Sinusoids are counted by transformers, not by OpenAI.
    positions = np.prod(shapes["encoder.embed_positions.weight"])
    assert min(abs(each / 1e6 - MILLIONS[size]) for each in (count, count - positions)) < 0.1


def test_conversions_are_each_others_inverse():
    config = tiny(70)
    weights = weights_of(peer(config))
    theirs = formats.hf_to_openai(weights)
    assert "encoder.blocks.0.attn.query.weight" in theirs
    assert "decoder.blocks.1.cross_attn_ln.bias" in theirs
    assert not any("layers" in name or "proj" in name or "embed_" in name for name in theirs)
    assert same_tensors(formats.openai_to_hf(theirs), weights)
    assert same_tensors(formats.hf_to_openai(formats.openai_to_hf(theirs)), theirs)
    assert formats.dims_to_config(formats.config_to_dims(config)) == config


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_openai_file_is_read(dtype, tmp_path):
    config = tiny(70)
    weights = {name: tensor.to(dtype) for name, tensor in weights_of(peer(config)).items()}
    content = {
        "dims": formats.config_to_dims(config),
        "model_state_dict": formats.hf_to_openai(weights),
    }
    torch.save(content, tmp_path / "base.pt")
    weights_read, config_read, extras = formats.read_model(tmp_path / "base.pt")
    assert same_tensors(weights_read, {name: tensor.float() for name, tensor in weights.items()})
    assert config_read == config and extras["generation"] == {}


@pytest.mark.parametrize(
    "form", ["whole", "sharded", "bin", "sharded bin", "fp16", "untied name", "old bin"]
)
def test_hugging_face_folder_is_read(form, tmp_path):
    config = tiny(70)
    model = peer(config)
    wanted = weights_of(model)
    if form == "fp16":
        model, wanted = (
            model.half(),
            {name: tensor.half().float() for name, tensor in wanted.items()},
        )
    model.save_pretrained(tmp_path, max_shard_size="50KB" if "sharded" in form else "50GB")
    if form == "sharded":
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    if "bin" in form:  # transformers no longer writes it
        for file in tmp_path.glob("*.safetensors"):
            options = {"_use_new_zipfile_serialization": form != "old bin"}
            name = file.name.replace("model", "pytorch_model").replace("safetensors", "bin")
            torch.save(load_file(file), tmp_path / name, **options)
            file.unlink()
        for index in tmp_path.glob("*.index.json"):
            text = (
                index.read_text()
                .replace("model-", "pytorch_model-")
                .replace(".safetensors", ".bin")
            )
            (tmp_path / "pytorch_model.bin.index.json").write_text(text)
            index.unlink()
    if form == "untied name":
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        assert "proj_out.weight" in model.state_dict()
    weights_read, config_read, extras = formats.read_model(tmp_path)
    assert same_tensors(weights_read, wanted) and config_read == config
    assert all(tensor.dtype == torch.float32 for tensor in weights_read.values())
    assert extras["generation"]["eos_token_id"] == SYMBOLS.eos and extras["tokenizer"] == tmp_path


# --- the export -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "padding"), [(SYMBOLS, 0), (BPE, 5), (FULL, 0)], ids=["symbols", "bpe", "full"]
)
def test_transformers_uses_an_export_as_it_is(tokenizer, padding, tmp_path):
    config = tiny(tokenizer.size + padding)
    model = peer(config, tokenizer)
    model.save_pretrained(tmp_path / "theirs")
    weights, _, _ = formats.read_model(tmp_path / "theirs")
    folder = tmp_path / "ours"
    formats.export(folder, {**weights, "ctc_head.weight": torch.ones(2, 2)}, config, tokenizer)
    loaded, report = WhisperForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same_tensors(weights_of(loaded), weights_of(model))
    in_16_bits = {name: tensor.half().float() for name, tensor in weights.items()}
    assert same_tensors(formats.read_model(folder / "model.pt")[0], in_16_bits)
    assert same_tensors(formats.read_model(folder)[0], weights)
    features = noise(folder)
    tokens, prompt = generate(loaded, features)
    assert prompt == tokenizer.prompt
    greedy = torch.tensor([prompt])
    for token in tokens[0]:  # it suppresses only ids beyond the tokenizer
        logits = loaded(input_features=features, decoder_input_ids=greedy).logits[
            0, -1, : tokenizer.size
        ]
        assert logits.argmax() == token
        greedy = torch.cat([greedy, torch.tensor([[token]])], dim=1)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    assert processor.batch_decode(tokens, skip_special_tokens=True)[0] == tokenizer.decode(
        tokens[0]
    )
    samples = np.random.default_rng(0).normal(0, 0.1, 16_000).astype("float32")
    pipeline = transformers.pipeline(
        "automatic-speech-recognition", model=str(folder), device="cpu"
    )
    assert isinstance(pipeline(samples)["text"], str)
    loaded.save_pretrained(tmp_path / "again")  # transformers writes back everything in it
    assert same_tensors(formats.read_model(tmp_path / "again")[0], weights)


def test_whisper_cpp_finds_what_its_scripts_read(tmp_path):
    """By convert-h5-to-ggml.py in the folder, and by convert-pt-to-ggml.py in model.pt, whose
    tensors it writes as they are and calls 16 bits wide."""
    folder = tmp_path / "ours"
    exported(folder, FULL)
    letters = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    assert all(set(piece) <= letters for piece in vocab)
    assert sorted(vocab.values()) == list(range(len(vocab)))
    assert json.loads((folder / "added_tokens.json").read_text())["<|startoftranscript|>"]
    settings = json.loads((folder / "config.json").read_text())
    assert all(type(settings[name]) is int for name in formats.DIMS)
    saved = torch.load(folder / "model.pt", weights_only=True)
    dims = {ours: settings[name] for name, ours in formats.DIMS.items()}
    assert saved["dims"] == {**dims, "n_text_state": settings["d_model"]}
    assert all(tensor.dtype == torch.float16 for tensor in saved["model_state_dict"].values())
    assert "encoder.blocks.0.attn.query.weight" in saved["model_state_dict"]


def test_an_empty_transcript_is_possible(tmp_path):
    """The defaults of config.json suppress eos as the first token, but noise must give an empty
    text."""
    config = tiny(SYMBOLS.size)
    weights = weights_of(peer(config))
    weights["decoder.embed_tokens.weight"][SYMBOLS.eos] = (
        1.0  # transformers initialises the pad token's to zero
    )
    weights["decoder.layer_norm.weight"].zero_()
    weights["decoder.layer_norm.bias"].fill_(1.0)
    formats.export(tmp_path / "ours", weights, config, SYMBOLS)
    pipeline = transformers.pipeline(
        "automatic-speech-recognition", model=str(tmp_path / "ours"), device="cpu"
    )
    assert pipeline(np.zeros(16_000, dtype="float32"))["text"] == ""


def test_base_settings_are_carried_and_ours_take_precedence(tmp_path):
    base = {
        "suppress_tokens": [1, 2, 7],
        "begin_suppress_tokens": [220],
        "alignment_heads": [[0, 1]],
        "forced_decoder_ids": [[1, None]],
        "transformers_version": "4.30",
        "language": "en",
        "max_length": 448,
    }
    model = exported(tmp_path / "fine-tuned", FULL, base=base)
    settings = model.generation_config
    assert settings.suppress_tokens == [1, 2, 7] and settings.begin_suppress_tokens == [220]
    assert settings.alignment_heads == [[0, 1]]
    assert settings.language == "<|vi|>"
    assert settings.max_length == 24
    assert getattr(settings, "forced_decoder_ids", None) is None
    assert len(settings.lang_to_id) == 99
    in_hindi = whisper_tokenizer.make_tokenizer({**FULL.state(), "language": "hi"})
    assert generate(model, noise(tmp_path / "fine-tuned"))[1] == FULL.prompt
    assert generate(model, noise(tmp_path / "fine-tuned"), language="hi")[1] == in_hindi.prompt


def test_ids_beyond_the_tokenizer_are_never_generated(tmp_path, no_hang):
    config = tiny(SYMBOLS.size + 3)
    weights = weights_of(peer(config))
    weights["decoder.layer_norm.bias"].fill_(1.0)
    weights["decoder.embed_tokens.weight"][SYMBOLS.size :] = 10.0
    formats.export(tmp_path / "ours", weights, config, SYMBOLS)
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert max(generate(model, noise(tmp_path / "ours"))[0][0]) < SYMBOLS.size


def test_an_english_only_model(tmp_path):
    tokenizer = whisper_tokenizer.WhisperTokenizer(
        FULL.vocab, FULL.merges, FULL.specials, multilingual=False
    )
    model = exported(tmp_path / "en", tokenizer, base={"language": "en", "task": "transcribe"})
    assert generate(model, noise(tmp_path / "en"))[1] == [tokenizer.start, tokenizer.no_timestamps]


@pytest.mark.parametrize("positions,seconds", [(50, 1), (500, 10)])
def test_the_window_follows_the_positions(positions, seconds, tmp_path):
    changes = {"max_source_positions": positions, "num_mel_bins": 128}
    model = exported(tmp_path / "ours", changes=changes)
    features = noise(tmp_path / "ours", seconds=0.4)
    assert features.shape == (1, 128, 100 * seconds)
    assert generate(model, features)[1] == SYMBOLS.prompt


def test_a_shape_that_openai_cannot_have(tmp_path, capsys):
    exported(tmp_path / "ours", changes={"encoder_ffn_dim": 64})
    assert not (tmp_path / "ours" / "model.pt").exists()
    assert "model.pt" in capsys.readouterr().out


def test_what_cannot_be_exported(tmp_path):
    config = tiny(SYMBOLS.size)
    weights = weights_of(peer(config))
    with pytest.raises(UsageError, match="whole seconds"):
        exported(tmp_path / "ours", changes={"max_source_positions": 60})
    with pytest.raises(UsageError, match=r"encoder.conv1.bias"):
        broken = {**weights, "encoder.conv1.bias": torch.full((32,), float("nan"))}
        formats.export(tmp_path / "ours", broken, config, SYMBOLS)
    assert not list(tmp_path.iterdir())


# --- hostile files --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    peer(tiny(70)).save_pretrained(folder)
    return folder


def settings(**changes):
    def spoil(folder):
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **changes}))

    return spoil


def as_bin(content, **options):
    def spoil(folder):
        (folder / "model.safetensors").unlink()
        torch.save(content(load_file_of(folder)), folder / "pytorch_model.bin", **options)

    def load_file_of(folder):
        return weights_of(peer(tiny(70)))

    return spoil


def write(name, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-1000])


def cut_bin(folder):
    as_bin(lambda weights: weights)(folder)
    cut("pytorch_model.bin")(folder)


def shards(listed):
    def spoil(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))

    return spoil


def compressed(folder):
    """As large as it claims to be only when it is decompressed."""
    as_bin(lambda weights: {**weights, "x": torch.zeros(1 << 20)})(folder)
    with zipfile.ZipFile(folder / "pytorch_model.bin") as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in content.items():
            archive.writestr(name, raw)


def flipped(folder):
    """With a changed byte, which only the archive's checksum shows."""
    as_bin(lambda weights: weights)(folder)
    raw = bytearray((folder / "pytorch_model.bin").read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / "pytorch_model.bin").write_bytes(raw)


def spoiled(change):
    """A pytorch_model.bin whose first convolution is `change(its bias)`."""
    return as_bin(
        lambda weights: {**weights, "encoder.conv1.bias": change(weights["encoder.conv1.bias"])}
    )


def unlimited(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.encoder.conv1.bias"][3] = float("inf")
    save_file(weights, folder / "model.safetensors")


def pipe(name):
    def spoil(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


class Trap:
    def __reduce__(self):
        return (os.system, ("echo the file was run; exit 1",))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
BIAS = "'encoder.conv1.bias' "
NOT_FLOATS = BIAS + "is not a floating-point"
NOT_FINITE = "conv1.bias' has values that are not finite"
HOSTILE = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "another type": (settings(model_type="wav2vec2"), "wav2vec2"),
    "no width": (settings(d_model=None), "d_model"),
    "heads": (settings(decoder_attention_heads=5), "does not divide"),
    "activation": (settings(activation_function="relu"), "activation"),
    "larger vocabulary": (settings(vocab_size=71), "embed_tokens"),
    "more layers": (settings(encoder_layers=2), "lacks"),
    "fewer layers": (settings(decoder_layers=1), "unexpected"),
    "config is a pipe": (pipe("config.json"), "no config.json"),
    "a billion layers": (settings(encoder_layers=10**9), "encoder_layers is '1000000000'"),
    "a wide model": (settings(d_model=2**31), "d_model is '2147483648'"),
    "a huge vocabulary": (settings(vocab_size=10**30), "vocab_size is '1000000"),
    "config is a pointer": (write("config.json", LFS), "git lfs pull"),
    "weights are a pointer": (write("model.safetensors", LFS), "git lfs pull"),
    "weights are cut": (cut("model.safetensors"), "cut short"),
    "weights are empty": (write("model.safetensors", b""), "damaged"),
    "bin is cut": (cut_bin, "damaged"),
    "bin is a list": (as_bin(lambda weights: [1]), "list"),
    "bin is compressed": (compressed, "damaged"),
    "bin is changed": (flipped, "damaged"),
    "bin is a pipe": (pipe("model.safetensors"), "no weights"),
    "bin is an object": (as_bin(lambda weights: Trap()), "refused"),
    "bin is quantised": (as_bin(lambda w: {n: t.char() for n, t in w.items()}), "quantised"),
    "expanded": (spoiled(lambda w: torch.zeros(1).expand(1 << 40)), BIAS + "is larger than its"),
    "sparse": (spoiled(lambda w: w.to_sparse()), BIAS + "is not a dense tensor"),
    "8-bit floats": (spoiled(lambda w: w.to(torch.float8_e4m3fn)), NOT_FLOATS),
    "NaN": (spoiled(lambda w: w * float("nan")), NOT_FINITE),
    "beyond fp32": (spoiled(lambda w: w.double() + 1e300), NOT_FINITE),
    "infinity": (unlimited, NOT_FINITE),
    "untied": (as_bin(lambda w: {**w, "proj_out.weight": torch.zeros(70, 32)}), "its embedding"),
    "a shard is missing": (shards({"a": "model-00001-of-00002.safetensors"}), "lacks 'model-00001"),
    "a shard's name is long": (shards({"a": "x" * 300}), "lacks 'xxx"),
    "a shard elsewhere": (shards({"a": "../other.safetensors"}), "lists no files"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_spoiled_folders_are_refused_in_one_line(case, sound, tmp_path, capfd, no_hang):
    spoil, expected = HOSTILE[case]
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    spoil(folder)
    with pytest.raises(Failure, match=expected) as caught:
        formats.read_model(folder)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "the file was run" not in capfd.readouterr().out


def dims(**changes) -> dict:
    return {"dims": {**formats.config_to_dims(tiny(70)), **changes}, "model_state_dict": {}}


@pytest.mark.parametrize(
    "content,expected",
    [
        (LFS, "git lfs pull"),
        (os.mkfifo, "not a regular file"),
        (b"", "not a file of torch.save"),
        (b"RIFFxxxxWAVE", "not a file of torch.save"),
        (pickle.dumps(Trap(), protocol=2), "refused"),
        ({"model": 1}, "dims and model_state_dict"),
        ({"dims": {}, "model_state_dict": {}}, "dims are not"),
        (dims(), "lacks"),
        ({**dims(), "model_state_dict": None}, "not weights by name"),
        (dims(n_mels=-1), "num_mel_bins is '-1'"),
        (dims(n_audio_state=2**31, n_text_state=2**31), "d_model is '2147483648'"),
    ],
)
def test_spoiled_files_are_refused_in_one_line(content, expected, tmp_path, capfd, no_hang):
    if content is os.mkfifo:
        os.mkfifo(tmp_path / "base.pt")
    elif isinstance(content, bytes):
        (tmp_path / "base.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "base.pt")
    with pytest.raises(UsageError, match=expected) as caught:
        formats.read_model(tmp_path / "base.pt")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "the file was run" not in capfd.readouterr().out
