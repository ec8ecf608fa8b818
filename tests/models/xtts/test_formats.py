"""XTTS's files: names and shapes against Coqui's, folders read and written, and files that are
refused."""

import json
import math
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors import safe_open

from common.errors import UsageError
from models.xtts import formats, tokenizer, vocoder
from tests.models.whisper.test_formats import Trap
from tests.models.xtts.small import FIXTURES, VOCAB, use_small_vocoder
from tests.peers import same_tensors

TOKENS = tokenizer.Vocabulary(VOCAB)
SIZES = {"text_positions": 12, "mel_positions": 9, "code_dim": 4, "dvae_hidden": 8}
CONFIG = formats.make_config(16, 2, 2, TOKENS.size, 6, start_text=TOKENS.start, **SIZES)
EXTRAS = {"config": {}, "vocab": VOCAB, "licence": True}


@pytest.fixture(autouse=True)
def small_vocoder(monkeypatch):
    use_small_vocoder(monkeypatch)


def random_groups(config: dict = CONFIG) -> dict:
    generator = torch.Generator().manual_seed(0)
    groups = {
        group: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for group, shapes in formats.expected_shapes(config).items()
    }
    counters = [name for name in groups["hifigan_decoder"] if name.endswith(formats.COUNTER)]
    groups["hifigan_decoder"] |= {name: torch.tensor(1000 + i) for i, name in enumerate(counters)}
    return groups | {"mel_stats": torch.rand(80, generator=generator)}


def coqui_state(groups: dict) -> dict:
    """Coqui's names of the groups `gpt`, `hifigan_decoder` and mel_stats."""
    state = {
        f"{group}.{name}": w
        for group in ("gpt", "hifigan_decoder")
        for name, w in groups[group].items()
    }
    return state | {"mel_stats": groups["mel_stats"]}


def description(config: dict = CONFIG, **args) -> dict:
    """A config.json as Coqui writes it."""
    model_args = {
        "gpt_layers": config["layers"],
        "gpt_n_model_channels": config["d_model"],
        "gpt_n_heads": config["heads"],
        "gpt_max_text_tokens": config["text_positions"] - 2,
        "gpt_max_audio_tokens": config["mel_positions"] - 3,
        "gpt_number_text_tokens": config["text_tokens"],
        "gpt_start_text_token": None,
        "gpt_stop_text_token": None,
        "gpt_num_audio_tokens": config["audio_tokens"],
        "gpt_start_audio_token": config["start_audio"],
        "gpt_stop_audio_token": config["stop_audio"],
        "gpt_use_perceiver_resampler": True,
        "decoder_input_dim": config["d_model"],
    }
    return {
        "model": "xtts",
        "languages": ["en", "fr"],
        "temperature": 0.61,
        "model_args": model_args | args,
    }


def coqui_folder(folder: Path, groups: dict, content: dict | None = None, **args) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(content or {"model": coqui_state(groups)}, folder / "model.pth")
    torch.save(groups["dvae"], folder / "dvae.pth")
    torch.save(groups["mel_stats"], folder / "mel_stats.pth")
    (folder / "config.json").write_text(json.dumps(description(**args)))
    (folder / "vocab.json").write_text(VOCAB, encoding="utf-8")
    return folder


# --- names and shapes -----------------------------------------------------------------------------


def test_the_full_size_has_the_released_numbers_of_parameters(monkeypatch):
    monkeypatch.setattr(formats, "HifiDecoder", vocoder.HifiDecoder)
    shapes = formats.expected_shapes(formats.RELEASED)
    buffers = ("running_", formats.COUNTER, "torch_spec.", "codebook.")
    names = {
        f"{group}.{name}": shape for group, part in shapes.items() for name, shape in part.items()
    }

    def count(prefix: str) -> int:
        chosen = [name for name in names if name.startswith(prefix)]
        return sum(math.prod(names[n]) for n in chosen if not any(b in n for b in buffers))

    vocoder_parts = ("hifigan_decoder.waveform_decoder.", "hifigan_decoder.speaker_encoder.")
    found = [count(part) for part in ("gpt.", *vocoder_parts, "dvae.")]
    assert found == [441_018_563, 17_827_808, 8_028_492, 51_567_184]
    assert count("") == 518_442_047


@pytest.mark.parametrize("group", ["gpt", "dvae"])
def test_names_and_shapes_are_coquis(group):
    sizes = json.loads((FIXTURES / "cases.json").read_text(encoding="utf-8"))["sizes"]
    with safe_open(FIXTURES / f"{group}.safetensors", "pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    theirs = {
        name.removeprefix("gpt.") if group == "gpt" and name.startswith("gpt.") else name: s
        for name, s in theirs.items()
    }
    assert formats.expected_shapes(sizes)[group] == {
        name: shape for name, shape in theirs.items() if not name.startswith("discrete_loss.")
    }


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"heads": 3}, "heads does not divide"),
        ({"start_text": TOKENS.size}, "START or STOP"),
        ({"start_audio": 5}, "audio tokens"),
        ({"mel_positions": "608"}, "mel_positions"),
    ],
)
def test_impossible_configurations(change, reason):
    with pytest.raises(UsageError, match=f"^it: .*{reason}"):
        formats.check_config(CONFIG | change, "it")


# --- reading --------------------------------------------------------------------------------------


def test_a_folder_is_read(tmp_path):
    groups = random_groups()
    read, config, extras = formats.read_model(coqui_folder(tmp_path, groups))
    assert same_tensors(read, groups) and config == CONFIG
    assert extras == {"config": description(), "vocab": VOCAB, "licence": True}
    frozen = {group: groups[group] for group in formats.FROZEN}
    assert same_tensors(formats.read_frozen(tmp_path, config), frozen)
    (tmp_path / "mel_stats.pth").unlink()
    assert same_tensors(formats.read_model(tmp_path)[0], groups)
    assert same_tensors(formats.read_frozen(tmp_path, config), frozen)
    with pytest.raises(UsageError, match=r"encoder.5.weight is"):
        formats.read_frozen(tmp_path, {**config, "code_dim": 5})


def test_a_training_checkpoint_is_read(tmp_path):
    groups = random_groups()
    state = {
        f"xtts.{name}": w.half() if w.is_floating_point() else w
        for name, w in coqui_state(groups).items()
    }
    state |= {f"dvae.{name}": w for name, w in groups["dvae"].items()}
    state |= {
        "xtts.gpt.gpt_inference.lm_head.1.weight": torch.zeros(2),
        "xtts.gpt.gpt.h.0.attn.bias": torch.ones(2) > 0,
        "xtts.gpt.gpt.h.1.attn.masked_bias": torch.tensor(-1e4),
        "xtts.gpt.gpt.wte.weight": torch.zeros(3),
        "torch_mel_spectrogram_dvae.mel_norms": torch.zeros(80),
        "dvae.discrete_loss.accumulator_index": torch.zeros(1),
        "torch_mel_spectrogram_style_encoder.mel_stft.spectrogram.window": torch.full(
            (4,), math.nan
        ),
    }
    optimizer = {"state": {0: {"exp_avg": torch.zeros(9)}}}
    content = {"model": state, "optimizer": optimizer, "step": 7, "config": {}}
    coqui_folder(tmp_path, groups, content)
    (tmp_path / "dvae.pth").unlink()
    (tmp_path / "mel_stats.pth").unlink()
    expected = {
        group: {
            n: w.half().float() if w.is_floating_point() else w for n, w in groups[group].items()
        }
        for group in ("gpt", "hifigan_decoder")
    }
    expected |= {"dvae": groups["dvae"], "mel_stats": groups["mel_stats"].half().float()}
    assert same_tensors(formats.read_model(tmp_path)[0], expected)
    assert same_tensors(formats.read_custom(tmp_path / "model.pth", CONFIG), expected["gpt"])


def test_both_spellings_of_weight_norm_are_read(tmp_path):
    groups = random_groups()
    state = {}
    for name, w in coqui_state(groups).items():
        name = name.replace("parametrizations.weight.original0", "weight_g")
        state[name.replace("parametrizations.weight.original1", "weight_v")] = w
    assert "hifigan_decoder.waveform_decoder.ups.0.weight_g" in state
    assert same_tensors(
        formats.read_model(coqui_folder(tmp_path, groups, {"model": state}))[0], groups
    )


@pytest.mark.parametrize(("prefix", "with_optimizer"), [("", False), ("xtts.", True)])
def test_a_fine_tuned_model_is_read(prefix, with_optimizer, tmp_path):
    groups = random_groups()
    state = {
        f"{prefix}{name}": torch.nn.Parameter(w, w.is_floating_point())
        for name, w in coqui_state(groups).items()
    }
    content = {"model": state, "optimizer": {"state": {}}} if with_optimizer else state
    torch.save(content, tmp_path / "tuned.pth")
    weights = formats.read_custom(tmp_path / "tuned.pth", CONFIG)
    assert same_tensors(weights, groups["gpt"]) and not any(
        w.requires_grad for w in weights.values()
    )


def test_another_vocabulary_is_refused(tmp_path):
    groups = random_groups(CONFIG | {"text_tokens": TOKENS.size + 3})
    message = r"\(gpt\): text_[^\n]+ belong to different models"
    with pytest.raises(UsageError, match=message):
        formats.read_model(coqui_folder(tmp_path, groups))
    with pytest.raises(UsageError, match=message):
        formats.read_custom(tmp_path / "model.pth", CONFIG)


# --- configurations that are pickled --------------------------------------------------------------


def save_with_object(path: Path, name: str, model: dict) -> None:
    """Saves an object of the class `name` beside the weights, as Coqui's first releases did."""
    module, _, kind = name.rpartition(".")
    package = types.ModuleType(module)
    made = type(kind, (), {"__module__": module})
    setattr(package, kind, made)
    setting = made()
    setting.layers = [30, {"a": (1, None)}]
    parents = [module.rsplit(".", i)[0] for i in range(1, module.count(".") + 1)]
    modules = {**{parent: types.ModuleType(parent) for parent in parents}, module: package}
    with pytest.MonkeyPatch.context() as patch:
        for each, content in modules.items():
            patch.setitem(sys.modules, each, content)
        torch.save({"config": setting, "model": model}, path)


@pytest.mark.parametrize("name", [formats.PICKLED[0], formats.PICKLED[-1]])
def test_a_pickled_configuration_is_read_without_its_class(name, tmp_path):
    groups = random_groups()
    coqui_folder(tmp_path, groups)
    save_with_object(tmp_path / "model.pth", name, coqui_state(groups))
    assert same_tensors(formats.read_model(tmp_path)[0], groups)
    assert name.rpartition(".")[0] not in sys.modules


@pytest.mark.parametrize(
    "name", ["TTS.tts.configs.xtts_config.Other", "evil.XttsConfig", "TTS.XttsArgs"]
)
def test_other_classes_are_refused(name, tmp_path):
    groups = random_groups()
    coqui_folder(tmp_path, groups)
    save_with_object(tmp_path / "model.pth", name, coqui_state(groups))
    with pytest.raises(UsageError, match=r"model\.pth is refused: [^\n]+ Python objects"):
        formats.read_model(tmp_path)


def test_the_stubs_are_not_left_registered(tmp_path):
    save_with_object(tmp_path / "model.pth", formats.PICKLED[0], {})
    with pytest.raises(UsageError):
        formats.read_custom(tmp_path / "model.pth", CONFIG)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "model.pth", weights_only=True)


@pytest.mark.parametrize("file", ["model.pth", "dvae.pth", "mel_stats.pth"])
def test_code_in_a_file_is_never_run(file, tmp_path, capfd):
    groups = random_groups()
    coqui_folder(tmp_path / "model", groups)
    content = {"model": coqui_state(groups), "config": Trap()}
    torch.save(content, tmp_path / "model" / file)
    with pytest.raises(UsageError, match=rf"{file} is refused: [^\n]+ could run code$"):
        formats.read_model(tmp_path / "model")
    assert "the file was run" not in capfd.readouterr().out


# --- damaged files: others are in tests/models/whisper/test_formats.py ----------------------------


def weights(change):
    def apply(folder: Path, groups: dict) -> None:
        state = coqui_state(groups)
        change(state)
        torch.save({"model": state}, folder / "model.pth")

    return apply


def extra(name: str):
    return weights(lambda state: state.update({name: torch.zeros(2)}))


def args(**changes):
    raw = json.dumps(description(**changes)).encode()
    return content("config.json", raw)


def content(name: str, raw):
    def apply(folder: Path, groups: dict) -> None:
        if isinstance(raw, bytes):
            (folder / name).write_bytes(raw)
        else:
            torch.save(raw, folder / name)

    return apply


def without(name: str):
    return lambda folder, groups: (folder / name).unlink()


HEAD = "gpt.mel_head.weight"
POST = "hifigan_decoder.waveform_decoder.conv_post.weight"
HOSTILE = {
    "no model.pth": (without("model.pth"), r"lacks model\.pth"),
    "no vocab.json": (without("vocab.json"), "lacks vocab"),
    "no dvae.pth": (without("dvae.pth"), r"lacks dvae\.pth"),
    "a list": (content("model.pth", [1]), "holds a list"),
    "no tensors": (content("model.pth", {"model": {}}), "lacks|mel_stats"),
    "a dict as statistics": (content("mel_stats.pth", {"a": 1}), "not a floating-point tensor"),
    "other statistics": (content("mel_stats.pth", torch.zeros(80)), "some are not above 0"),
    "an unknown part": (extra("clvp.x"), "'clvp.x' is not part of XTTS-v2"),
    "the first version": (extra("gpt.prompt_embedding.weight"), "unexpected 'prompt_emb"),
    "a missing tensor": (weights(lambda s: s.pop(HEAD)), r"\(gpt\) lacks 'mel_head.weight'"),
    "half a vocoder": (weights(lambda s: s.pop(POST)), "lacks 'waveform_decoder"),
    "another shape": (weights(lambda s: s.update({HEAD: torch.zeros(9)})), "mel_head.weight is"),
    "a name twice": (weights(lambda s: s.update({f"xtts.{HEAD}": s[HEAD]})), "there twice"),
    "many layers": (args(gpt_layers=128), r"\(gpt\) lacks"),
    "a wide model": (args(gpt_n_model_channels=8192, decoder_input_dim=8192), "asks for"),
    "no perceiver": (args(gpt_use_perceiver_resampler=False), "perceiver_resampler is 'False'"),
    "another rate": (args(output_sample_rate=22050), "is '22050'; XTTS-v2 has 24000"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_are_refused_in_one_line(name, tmp_path):
    groups = random_groups()
    coqui_folder(tmp_path, groups)
    change, reason = HOSTILE[name]
    change(tmp_path, groups)
    with pytest.raises(UsageError, match=reason) as refusal:
        formats.read_model(tmp_path)
    message = str(refusal.value)
    assert "\n" not in message
    assert message.startswith(str(tmp_path))
    assert len(message) < len(str(tmp_path)) + 300


# --- exporting ------------------------------------------------------------------------------------


def test_an_export_is_what_coqui_loads(tmp_path):
    groups, clip = random_groups(), np.arange(-50, 50, dtype=np.int16)
    speakers = {
        name: (samples, formats.Voice(torch.rand(1, 32, 16), torch.rand(1, 512)))
        for name, samples in (("አበበ", clip), ("a/../b", clip[:9]), ("A_b", clip))
    }
    names = formats.export(tmp_path / "out", groups, CONFIG, EXTRAS, speakers)
    others = ["LICENSE.txt", "made_from.json", "speakers", "speakers_xtts.pth", "reference.wav"]
    assert names == sorted([*formats.FILES, *others])
    known = torch.load(tmp_path / "out" / "speakers_xtts.pth", weights_only=True)
    assert [*known] == ["አበበ", "a_b", "A_b_"]
    for (_, voice), saved in zip(speakers.values(), known.values(), strict=True):
        latents, vector = saved.values()  # as Coqui's code takes them
        assert torch.equal(latents, voice.latents) and vector.shape == (1, 512, 1)
        assert torch.equal(vector[:, :, 0], voice.speaker)
    first, rate = soundfile.read(tmp_path / "out" / "reference.wav", dtype="int16")
    assert rate == 22_050 and np.array_equal(first, clip)
    saved = torch.load(tmp_path / "out" / "model.pth", weights_only=True)
    assert saved.keys() == {"model"} and same_tensors(saved["model"], coqui_state(groups))
    assert same_tensors(
        torch.load(tmp_path / "out" / "dvae.pth", weights_only=True), groups["dvae"]
    )
    assert torch.equal(
        torch.load(tmp_path / "out" / "mel_stats.pth", weights_only=True), groups["mel_stats"]
    )
    assert (tmp_path / "out" / "vocab.json").read_text(encoding="utf-8") == VOCAB
    assert "non-commercial" in (tmp_path / "out" / "LICENSE.txt").read_text()
    clips = {
        path.name: soundfile.read(path, dtype="int16")
        for path in (tmp_path / "out" / "speakers").iterdir()
    }
    sizes = {name: (rate, len(samples)) for name, (samples, rate) in clips.items()}
    written_sizes = {"አበበ.wav": 100, "a_b.wav": 9, "A_b_.wav": 100}
    assert sizes == {name: (22_050, size) for name, size in written_sizes.items()}
    assert np.array_equal(clips["አበበ.wav"][0], clip)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model"] == "xtts" and written["languages"] == ["en"]
    tokens = {"gpt_start_text_token": TOKENS.start, "gpt_stop_text_token": 0}
    assert {**description()["model_args"], **tokens}.items() <= written["model_args"].items()
    again, config, extras = formats.read_model(tmp_path / "out")
    assert (
        same_tensors(again, groups) and config == CONFIG and extras == EXTRAS | {"config": written}
    )


def test_settings_of_the_source_and_its_licence_are_kept(tmp_path):
    groups = random_groups()
    read, config, extras = formats.read_model(
        coqui_folder(tmp_path / "in", groups, gpt_batch_size=3)
    )
    formats.export(tmp_path / "out", read, config, extras, {})
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["temperature"] == 0.61 and written["languages"] == ["en", "fr"]
    assert written["model_args"]["gpt_batch_size"] == 3
    assert written["model_args"]["gpt_start_text_token"] == TOKENS.start
    assert formats.read_model(tmp_path / "out")[2]["licence"]
    # The second export replaces the first.
    formats.export(tmp_path / "out", read, config, extras | {"licence": False}, {})
    assert not (tmp_path / "out" / "LICENSE.txt").exists()
    assert not formats.read_model(tmp_path / "out")[2]["licence"]


def test_only_the_tensors_themselves_are_written(tmp_path):
    groups = random_groups()
    plain = formats.export(tmp_path / "plain", groups, CONFIG, EXTRAS, {})
    large = torch.zeros(1 << 20, 16)
    head = groups["gpt"]["mel_head.weight"]
    large[: len(head)] = head
    trained = groups["gpt"] | {"mel_head.weight": torch.nn.Parameter(large[: len(head)].double())}
    views = groups | {"gpt": trained, "mel_stats": groups["mel_stats"].repeat(9)[:80]}
    assert formats.export(tmp_path / "views", views, CONFIG, EXTRAS, {}) == plain
    sizes = [(tmp_path / folder / "model.pth").stat().st_size for folder in ("plain", "views")]
    assert sizes[0] == sizes[1]
    assert same_tensors(formats.read_model(tmp_path / "views")[0], groups)
