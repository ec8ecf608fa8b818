"""What the recipes refuse in one line before anything is trained, as tables: words of the command
line, or damage to a file, and a part of the message. Flags that exclude or need each other are in
test_commands.py."""

import functools
import json
import os
import shutil
from pathlib import Path

import pytest

from common import checkpoint
from recipes import (
    konkani_conformer,
    matcha_voice,
    parakeet_tdt,
    template,
    wav2vec2_ctc,
    whisper_morse,
    whisper_vietnamese,
)
from tests import contract
from tests.recipes import runs
from tests.recipes.cases import CASES, make_small
from tests.recipes.runs import SHORT, ran, refused

TRAIN_FIRST = "no weights at {out}/checkpoints/best.safetensors: train first"
NO_START = "training needs a model to start from: add --model_dir DIR"
NOT_DOWNLOADED = "no such file or folder, and nothing is downloaded here"
NOT_REPLACED = "{here}/foreign: it holds files that are not"
OF_EVERY = [  # words and a part of the message, for each recogniser; {here} is a folder
    ("{start} --train_manifest {here}/gone.json", "manifest {here}/gone.json: No such file"),
    ("--evaluate", TRAIN_FIRST),
    ("--transcribe {here}/a.wav", TRAIN_FIRST),
    ("--resume {here}/gone.pt", "{here}/gone.pt: No such file"),
    ("--init_from {here}/gone.pt", "{here}/gone.pt: No such file"),
    ("--resume {here}/gone.safetensors", "--resume {here}/gone.safetensors: "),
    ("--init_from {here}/empty", "--init_from {here}/empty: it is a folder"),
    ("--transcribe a.wav --resume {long}.pt", "xxx.pt"),
]
OF_A_RELEASED = [  # for each that starts from released weights; {hf} is another folder
    ("{train} --model_dir {here}/empty", "config.json"),
    ("{train} --model_dir {here}/gone", f"--model_dir {{here}}/gone: {NOT_DOWNLOADED}"),
    ("{train} --model_file {here}/gone.pt", f"--model_file {{here}}/gone.pt: {NOT_DOWNLOADED}"),
    ("{train} --model_dir openai/whisper-base", "nothing is downloaded here"),
    ("{train} --model_file {here}/pipe", "pipe: it is not a regular file"),
    ("{train} --model_file {hf}", "it is a folder: use --model_dir"),
    ("{train} --model_dir {hf}/config.json", "it is a file: use --model_file"),
    ("{train} --model_dir {hf} --export {here}/foreign", NOT_REPLACED),
    ("{train} --model_dir {hf} --export {here}/a.wav/x", "a part of that path is a file"),
    ("{train} --model_dir {hf} --export {out}", "name a folder of its own for the export"),
    ("{train} --from_scratch --resume {tuned}", "model began from released weights"),
    ("{train} --model_dir {hf} --resume {saved}", "model began from scratch) conflicts"),
    ("--transcribe {here}/gone.wav --model_dir {hf}", "gone.wav: no such file or folder"),
]
OF_OWN_DATA = [  # which have no demo's model
    ("{train}", NO_START),
    ("{train} --resume auto", "there is no checkpoint to resume from"),
]
OF_ONE = {
    konkani_conformer: [
        ("--min_duration 9 --max_duration 3", "--min_duration 9 is not below --max_duration 3"),
        ("{train} --min_duration 1 --strict_data", "utterances rejected (--strict_data)"),
        ("{train} --vocab_file {here}/gone.json", "{here}/gone.json"),
        ("{train} --d_model 30", "--d_model 30 must be a multiple of twice --attention_heads 4"),
        ("--d_model 32 --resume {saved}", "--d_model 32 conflicts"),
        ("--subsampling 8 --resume {best} --evaluate", "--subsampling 8 conflicts"),
        ("--d_model 32 --resume {best} --export {here}/x", "--d_model 32 conflicts"),
    ],
    whisper_vietnamese: [
        ("--train_manifest {here}/mp3.json --from_scratch", "no usable utterance: 2 x file is"),
        ("{train} --from_scratch --timestamp_share 0.5", "from scratch has no time tokens"),
        ("{train} --model_dir {hf} --timestamp_share 0.5", "this model has no time tokens"),
        ("{train} --model_file {hf}/config.json", "config.json is not a file of torch.save"),
        ("{train} --model_file {hf}/model.safetensors", "give the folder that holds it"),
        ("{train} --model_file {alone}", "give the tokenizer with --tokenizer_file"),
        ("{train} --model_dir {hf} --language kok", "Whisper has no token for it"),
        ("{train} --model_dir {hf} --ctc_weight 0.3", "--ctc_weight is for models from scratch"),
        ("{train} --model_dir {hf} --compare_to {here}/gone", "{here}/gone: no such file"),
        ("{train} --model_dir {hf} --compare_to {here}/a.wav", "is not a file of torch.save"),
        ("{train} --model_dir {hf} --tokenizer_file {here}/gone", "{here}/gone: no such"),
        ("{train} --from_scratch --max_target_tokens 3", "it must be at least 8"),
        ("{train} --from_scratch {huge}", "too large for this machine"),
        ("{train} --from_scratch --vocab_size 10", "--vocab_size 10 is too few"),
        ("{train} --from_scratch --d_model 30 --attention_heads 4", "must be a multiple of twice"),
        ("{train} --model_dir {hf} --max_target_tokens 1000", "the decoder has 448 positions"),
        ("{train} --model_dir {hf} --max_duration 60", "the model's longest input is"),
        ("--resume {here}/gone.pt --export {here}/x", "no weights at {here}/gone.pt"),
        ("{train} --resume {saved} --language en", "--language en (the checkpoint has"),
        ("--resume {best} --language en --evaluate", "conflicts with the checkpoint"),
        ("--language=vi|en", "is not a language, such as"),
        ("{train} --resume {morse}", "was saved by recipes/whisper_morse.py"),
    ],
    whisper_morse: [
        ("--test_manifest {train_file} --data_dir {here} --evaluate", "recordings to test on"),
        ("--wpm 30 20", "--wpm 30 20: give two numbers from 5 to 150, the lower one first"),
        ("--conditions wide", "training needs a model to start from"),
        ("--data_dir {here}/gone --from_scratch", "neither splits/train.csv nor metadata.csv"),
        ("--alignment_weight 0.3 --model_dir {hf}", "a released encoder is aligned already"),
        ("--speed_perturbation", "would move what --alignment_weight trains on"),
        ("--evaluate --model_dir {hf} --language en", "--evaluate needs a test set"),
        ("--align a.wav a.txt", "recipes/wav2vec2_ctc.py aligns a recording with its text"),
        ("--resume {saved} --d_model 64", "--d_model 64 (the checkpoint has 16) conflicts"),
        ("--resume {saved} --language vi", "--language vi (the checkpoint has en) conflicts"),
        ("--resume {best}", "holds weights only"),
    ],
    parakeet_tdt: [
        ("{train} --model_dir {hf} --ctc_weight 0.3", "0.3: the model has no CTC head"),
        ("{train} --model_file {here}/cut.nemo", "is not a .nemo archive"),
        ("{train} --resume {saved} --vocab_size 500", "--vocab_size 500 (the checkpoint has "),
        ("{train} --add_tokens % --model_dir {hf}", "makes a model with it, which --model_dir"),
        ("{train} --from_scratch --vocab_size 5", "--vocab_size 5 is too few for the "),
        ("--evaluate --model_dir {hf}", "trained on other data than the demo corpus"),
        ("{align} --model_dir {hf}", "--align: the model has no CTC head"),
        ("--resume {saved}", "trained on other data than the demo corpus"),
    ],
    wav2vec2_ctc: [
        ("{train} --vocab own --init_from {saved}", "--vocab goes with --model_dir or"),
    ],
}


def all_rows():
    for case in CASES:
        if not case.transcribes or case.recipe not in OF_ONE:
            continue
        rows = [*OF_EVERY, *OF_ONE[case.recipe]]
        if case.reads_export:
            rows += OF_A_RELEASED
        if case.reads_export and case.recipe is not whisper_morse:
            rows += OF_OWN_DATA
        for words, message in rows:
            yield pytest.param(case, words, message, id=f"{case.name} {words[:60]}")


@pytest.fixture(autouse=True, scope="module")
def small_models():
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        yield


@pytest.fixture(scope="module")
def made(konkani, tmp_path_factory):
    """made(case): the files of a run of two updates, and with `tuned` of one from its export."""

    @functools.cache
    def make(case) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(case.name)
        data = case.material(konkani, folder)
        steps = [*SHORT, "--save_every", "1"]
        export = ["--export", folder / "hf"] if case.reads_export else []
        flags = [*contract.flags_of(case, data), *steps]
        ran(case.recipe, *flags, *export, "--output_dir", folder)
        if (folder / "hf" / "model.pt").exists():
            (folder / "alone").mkdir()
            shutil.copy(folder / "hf" / "model.pt", folder / "alone")
        places = {
            "train": " ".join(map(str, [*data, *case.limits.split()])),
            "alone": folder / "alone" / "model.pt",
            "hf": folder / "hf",
            "best": folder / "checkpoints" / "best.safetensors",
            "saved": checkpoint.list_checkpoints(folder / "checkpoints")[0],
        }
        if case.reads_export:
            start = [*data, *case.limits.split(), "--model_dir", folder / "hf", *steps]
            ran(case.recipe, *start, "--output_dir", folder / "tuned")
            places["tuned"] = checkpoint.list_checkpoints(folder / "tuned" / "checkpoints")[0]
        return {name: str(path) for name, path in places.items()}

    return make


@pytest.fixture(scope="module")
def here(tmp_path_factory, konkani) -> Path:
    """A folder with what a user may name by mistake."""
    folder = tmp_path_factory.mktemp("here")
    os.mkfifo(folder / "pipe")
    for name in ("empty", "foreign"):
        (folder / name).mkdir()
    (folder / "foreign" / "mine.txt").touch()
    rows = [{"audio_filepath": f"{number}.mp3", "text": "xin chào"} for number in range(2)]
    (folder / "mp3.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "cut.nemo").write_bytes(bytes(1000))
    (folder / "a.txt").write_text("xin chào", encoding="utf-8")
    shutil.copy(next(Path(konkani["val"]).parent.rglob("*.wav")), folder / "a.wav")
    return folder


@pytest.mark.parametrize(("case", "words", "message"), list(all_rows()))
def test_a_mistake_is_answered_in_one_line_before_anything_is_trained(
    case, words, message, made, here, konkani, tmp_path, no_hang
):
    morse = next(each for each in CASES if each.recipe is whisper_morse)
    names = {
        **made(case),
        "morse": made(morse)["saved"] if "{morse}" in words else "",
        "here": here,
        "out": tmp_path / "out",
        "start": case.model,
        "train_file": konkani["train"],
        "long": "x" * 300,
        "align": f"--align {here}/a.wav {here}/a.txt --output {tmp_path}/a.json",
        "huge": "--d_model 8192 --encoder_layers 128 --decoder_layers 128",
    }
    words = words.format(**names).split()
    status, err = refused(case.recipe, "--output_dir", tmp_path / "out", *words)
    assert status in (1, 2) and message.format(**names) in err and len(err) < 1000, err
    assert not list(tmp_path.rglob("checkpoint_step*")) and not list(tmp_path.rglob("data"))


# --- damaged records ------------------------------------------------------------------------------

CONFIG = ("model_info", "config")
DAMAGED = {  # what is changed in the records of best.safetensors, and a part of the message
    template: [(("model_info", "layers"), 128, "not those of the model that it describes")],
    konkani_conformer: [
        ((*CONFIG, "encoder_layers"), 10**9, "encoder_layers is '1000000000'"),
        (("model_info", "characters"), [3], "characters[0] is '3'"),
    ],
    whisper_morse: [
        ((*CONFIG, "encoder_layers"), 10**9, "config.encoder_layers is '1000000000'"),
        (("model_info", "tokenizer", "vocab"), {}, "is not a Whisper tokenizer"),
        (("model_info", "generation"), {"suppress_tokens": [5000]}, "not those of its tokenizer"),
        (("model_info", "ctc_tokens"), 3, "not those of its tokenizer"),
        (("run_info", "data", "longest"), float("nan"), "longest is 'nan'"),
    ],
    parakeet_tdt: [
        ((*CONFIG, "layers"), 10**9, "config.layers is '1000000000'"),
        ((*CONFIG, "ctc"), False, "has unexpected 'ctc_head."),
        (("model_info", "tokenizer", "sentencepiece"), "00", "tokenizer"),
    ],
    wav2vec2_ctc: [
        (CONFIG, {}, "config"),
        (("model_info", "new_pieces"), "x", "new_pieces"),
    ],
    matcha_voice: [
        ((*CONFIG, "heads"), 7, "no model has the shape"),
        (("model_info", "symbols"), ["_", "^", "$", " ", ""], "symbols"),
    ],
}


def damaged_records():
    for case in CASES:
        for place, value, message in DAMAGED.get(case.recipe, ()):
            words = f"{case.name} {' '.join(place[1:])} {value}"
            yield pytest.param(case, place, value, message, id=words[:70])


@pytest.mark.parametrize(("case", "place", "value", "message"), list(damaged_records()))
def test_damaged_records_are_named_before_weights_are_read(
    case, place, value, message, made, tmp_path, no_hang
):
    target = tmp_path / "best.safetensors"

    def change(records: dict) -> None:
        *folders, name = place
        functools.reduce(dict.__getitem__, folders, records)[name] = value

    runs.write_best(target, made(case)["best"], change=change)
    flags = ["--evaluate", "--resume", target, *contract.held_out(made(case)["train"].split())]
    status, err = refused(case.recipe, *flags, *case.limits.split(), "--output_dir", tmp_path)
    assert status == 2 and message in err and len(err) < 600, err
