"""The model card of an export: its block of metadata, and only what is known."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import ModelCard

from common import files
from common.errors import DataError
from models import card
from models.whisper import formats
from models.whisper import start as whisper
from models.whisper.tokenizer import train_bpe
from models.xtts import exports
from speech.data.columns import Codes
from speech.data.splits import RunInfo
from speech.writing.text import NAMES, for_scoring, in_lower_case

WHISPER = card.Form("transformers", card.RECOGNITION, "Whisper", card.PIPELINE)
PARAKEET = card.Form("nemo", card.RECOGNITION, "Parakeet", card.PIPELINE)
LOWER, CASED = NAMES[in_lower_case], NAMES[for_scoring]
DATA = RunInfo(
    held_out=[],
    longest=3.0,
    demo=False,
    sets={
        "train": {"utterances": 12_345, "hours": 12.34, "languages": ["vi"]},
        "replay": {"utterances": 67, "hours": 0.12, "languages": ["vi"]},
    },
)
MADE = {
    "step": 400,
    "cer": 0.061,
    "wer": 0.15,
    "metric": "cer",
    "evaluations": [[0, 0.3], [400, 0.061]],
    "made_by": {
        "command": "python recipes/whisper_vietnamese.py --train_manifest 'my file.json'",
        "base": "models/whisper-base",
        "tier": "t4",
        "device": "Tesla T4",
        "versions": {"python": "3.11.9", "torch": "2.11.0"},
    },
}


def rates(wer: float) -> dict:
    return {"wer": {"rate": wer}, "cer": {"rate": wer / 2}}


def weights(folder, made=MADE):
    """Where the weights of a run would be, with the loop's notes beside them."""
    (folder / "best.json").write_text(json.dumps(made), encoding="utf-8")
    return folder / "best.safetensors"


def test_the_hub_reads_the_results(tmp_path):
    results = {"title": "test set", "rates": {LOWER: rates(0.15)}}
    results["warning"] = "warning: it will lose text"
    about = card.About("a", None, weights(tmp_path), DATA, results)
    assert "\n\nwarning: it will lose text\n\n" in card.readme("mine", about, WHISPER)
    read = ModelCard(card.readme("mine", about, WHISPER)).data
    assert [each.metric_value for each in read.eval_results] == [15.0, 7.5]
    assert (read.model_name, read.license) == ("mine", "apache-2.0")


def test_the_rates_are_those_of_the_export(tmp_path):
    """A language model is used by nobody who loads an export without one."""
    results = {"title": "test set, best", "rates": {LOWER: rates(0.1)}}
    results["without_lm"] = {LOWER: rates(0.2)}
    about = card.About("a", None, weights(tmp_path), DATA, results)
    text = card.readme("mine", about, WHISPER)
    assert [row.split("|")[3:6] for row in text.splitlines() if row.startswith("| test")] == [
        [" WER ", " - ", " 20.00 "],
        [" CER ", " - ", " 10.00 "],
    ]
    text = card.readme("mine", about, dataclasses.replace(WHISPER, with_lm="FOLDER/lm.arpa"))
    place = "test set, with the language model of these recipes"
    assert f"| {place} | {LOWER} | WER | - | 10.00 |" in text
    values = [each["value"] for each in block_of(text)["model-index"][0]["results"][0]["metrics"]]
    assert values == [20.0, 10.0]


def block_of(text: str) -> dict:
    """The metadata, as the hub reads them."""
    assert text.startswith("---\n")
    return yaml.safe_load(text[4:].partition("\n---\n")[0])


def test_all_that_is_known(tmp_path):
    results = {
        "title": "test set, best weights, 9 utterances",
        "compared_to": "models/whisper-base",
    }
    results["rates"] = {CASED: rates(0.25), LOWER: rates(0.15)}
    results["before"] = {CASED: rates(0.5), LOWER: rates(0.45)}
    about = card.About("whisper_vietnamese", None, weights(tmp_path), DATA, results, ("vi",))
    text = card.readme("mine", about, WHISPER)
    block = block_of(text)
    results = block.pop("model-index")[0]["results"]
    assert block == {
        "language": ["vi"],
        "license": "apache-2.0",
        "base_model": "openai/whisper-base",
        "library_name": "transformers",
        "pipeline_tag": "automatic-speech-recognition",
        "tags": ["whisper", "speech"],
        "metrics": ["wer", "cer"],
    }
    # Only rates that others can compare.
    assert [each["value"] for each in results[0]["metrics"]] == [15.0, 7.5]
    assert results[0]["metrics"][0]["name"] == f"WER in %, {LOWER}"
    for part in (
        "fine-tuned from openai/whisper-base",
        'pipeline("automatic-speech-recognition", "mine")',
        "| training | 12,345 | 12.3 |",
        "| replayed | 67 | ",
        f"| test set | {LOWER} | WER | 45.00 | 15.00 |",
        f"| test set | {CASED} | CER | 25.00 | 12.50 |",
        f"| evaluation set, in training | {CASED} | CER | 30.00 | 6.10 |",
        f"| evaluation set, in training | {CASED} | WER | - | 15.00 |",
        "on Tesla T4, tier t4, weights of update 400, python 3.11.9, torch 2.11.0",
        MADE["made_by"]["command"],
    ):
        assert part in text


def test_an_export_alone_says_how_its_texts_were_compared(tmp_path):
    about = card.About("whisper_vietnamese", None, weights(tmp_path), DATA, reading=LOWER)
    text = card.readme("mine", about, WHISPER)
    assert f"| evaluation set, in training | {LOWER} | CER | 30.00 | 6.10 |" in text


def test_a_reading_that_changes_nothing_has_no_rows(tmp_path):
    results = {"title": "test set", "rates": {CASED: rates(0.15), LOWER: rates(0.15)}}
    about = card.About("a", None, weights(tmp_path), DATA, results)
    text = card.readme("mine", about, WHISPER)
    assert text.count("| test set |") == 2 and f"| test set | {LOWER} | WER |" in text


def test_weights_that_are_not_of_an_evaluation_have_their_runs_base_and_no_rates(tmp_path):
    weights(tmp_path)
    about = card.About("whisper_vietnamese", None, tmp_path / "checkpoint_step_500.pt", DATA)
    text = card.readme("mine", about, WHISPER)
    assert block_of(text)["base_model"] == "openai/whisper-base"
    assert "## Error rates" not in text and "weights of update" not in text


def test_what_is_not_known_is_left_out(tmp_path):
    text = card.readme("mine", card.About("parakeet_tdt", None, tmp_path / "a.pt"), WHISPER)
    block = block_of(text)
    assert block.keys() == {"library_name", "pipeline_tag", "tags"}
    assert "fine-tuned from a released model. The licence of that model holds" in text
    assert "## Use" in text and text.count("## ") == 1 and "None" not in text
    (tmp_path / "best.json").write_text("{")
    broken = card.About("parakeet_tdt", None, tmp_path / "best.safetensors")
    assert card.readme("mine", broken, WHISPER) == text


def test_a_model_compared_to_another_one_than_its_base_has_no_rate_before(tmp_path):
    results = {"title": "test set", "compared_to": "other", "rates": {LOWER: rates(0.2)}}
    results["before"] = {LOWER: rates(0.4)}
    about = card.About("whisper_vietnamese", None, weights(tmp_path), DATA, results)
    assert f"| test set | {LOWER} | WER | - | 20.00 |" in card.readme("m", about, WHISPER)


def test_random_weights_have_no_base_and_a_demo_says_so(tmp_path):
    data = RunInfo(held_out=[], longest=3.0, demo=True)
    about = card.About("a", "whisper-base", weights(tmp_path), data, is_new=True)
    text = card.readme("mine", about, WHISPER)
    assert not {"license", "base_model"} & block_of(text).keys()
    assert "trained from random weights" in text and "synthetic audio" in text


def test_released_weights_are_converted_only():
    text = card.readme("m", card.About("a", "x/parakeet-tdt-0.6b-v3.nemo"), PARAKEET)
    assert "nvidia/parakeet-tdt-0.6b-v3, converted and not trained" in text
    assert block_of(text)["license"] == "cc-by-4.0" and block_of(text)["library_name"] == "nemo"


@pytest.mark.parametrize(
    ("name", "licence"),
    [
        ("nemotron-speech-streaming-en-0.6b", "nvidia-open-model-license"),
        ("nemotron-3.5-asr-streaming-0.6b", "openmdw-1.1"),
    ],
)
def test_nemotrons_have_licences_of_their_own(name, licence):
    text = card.readme("m", card.About("parakeet_tdt", f"{name}.nemo"), PARAKEET)
    assert block_of(text)["license_name"] == licence and "non-commercial" not in text
    assert f"The licence of nvidia/{name} is [{licence}](https://" in text


@pytest.mark.parametrize(("step", "is_said"), [(0, True), (400, False)])
def test_weights_that_training_did_not_better_are_called_so(tmp_path, capsys, step, is_said):
    about = card.About("a", "whisper-base", weights(tmp_path, {**MADE, "step": step}))
    text = card.readme("mine", about, WHISPER)
    assert ("Its weights are those before training" in text) == is_said
    said = capsys.readouterr().out
    assert said.startswith("the best weights are those before training") == is_said
    assert said.count("\n") == is_said


def test_coquis_licence_holds_whatever_the_base_is_called(tmp_path):
    made = {**MADE, "metric": "mel", "mel": 3.5, "evaluations": [[0, 4.25], [400, 3.5]]}
    del made["cer"], made["wer"]
    about = card.About("xtts_amharic", "my-voice", weights(tmp_path, made), licence=card.CPML)
    text = card.readme("m", about, exports.CARD)
    block = block_of(text)
    assert block["license"] == "other" and block["license_name"] == "coqui-public-model-license"
    assert "**non-commercial use only**" in text and "base_model" not in block
    assert "mel loss of the evaluation set 3.500, 4.250 before training" in text


@pytest.mark.parametrize(
    ("path", "name", "licence"),
    [
        ("whisper-base", "openai/whisper-base", "apache-2.0"),
        ("whisper-large-v3-turbo", "openai/whisper-large-v3-turbo", "mit"),
        ("a/models--openai--whisper-tiny.en/snapshots/1a", "openai/whisper-tiny.en", "apache-2.0"),
        ("hub/models--vinai--PhoWhisper-base/snapshots/1a", "vinai/PhoWhisper-base", None),
        ("parakeet-tdt-0.6b-v2", "nvidia/parakeet-tdt-0.6b-v2", "cc-by-4.0"),
        ("parakeet-rnnt-0.6b.nemo", "nvidia/parakeet-rnnt-0.6b", "cc-by-4.0"),
        ("parakeet-tdt_ctc-1.1b.nemo", "nvidia/parakeet-tdt_ctc-1.1b", "cc-by-4.0"),
        ("parakeet-unified-en-0.6b", "nvidia/parakeet-unified-en-0.6b", None),
        ("parakeet_tdt.nemo", None, None),
        ("XTTS-v2", "coqui/XTTS-v2", "other"),
        ("omniASR-CTC-300M.pt", "facebook/omniASR-CTC-300M", "apache-2.0"),
        ("wav2vec2-xls-r-300m", "facebook/wav2vec2-xls-r-300m", "apache-2.0"),
        ("hubert-base-ls960", "facebook/hubert-base-ls960", "apache-2.0"),
        ("mms-300m", "facebook/mms-300m", "cc-by-nc-4.0"),
        ("mms-1b-all", "facebook/mms-1b-all", "cc-by-nc-4.0"),
        ("wav2vec2-large-xlsr-53-turkish", None, None),
        (None, None, None),
    ],
)
def test_released_models_are_known_by_their_names(path, name, licence):
    found, terms = card.released(path)
    assert (found, terms.get("license")) == (name, licence)


def test_watched_sets_have_rows_before_and_after(tmp_path):
    values = {"old": [[0, 0.1], [20, 0.12], [40, 0.3]], "late": [[20, 0.5]], "gone": [[40, 0.5]]}
    made = {"step": 20, "metric": "cer", "cer": 0.2, "evaluations": [[0, 0.9]], "watched": values}
    files.write_text(tmp_path / "best.json", json.dumps(made))
    text = card.readme("a", card.About("a", None, tmp_path / "best.safetensors"), WHISPER)
    lines = [line for line in text.splitlines() if "watched in training" in line]
    assert [line.split(" | ", 2)[2] for line in lines] == [
        "CER | 10.00 | 12.00 |",
        "CER | - | 50.00 |",
    ]


def test_names_are_quoted_for_yaml(tmp_path):
    files.write_text(tmp_path / "best.json", "{}")
    about = card.About("a", None, tmp_path / "best.safetensors", languages=("no", "vi"))
    assert block_of(card.readme("a: b", about, WHISPER))["language"] == ["no", "vi"]


def test_names_end_no_table_and_no_line(tmp_path):
    hostile = '<img src=x>|a`b"\n# c\n'
    made = MADE["made_by"] | {"tier": hostile, "base": f"m/{hostile}"}
    series = {"watched": {hostile: [[400, 0.1]]}, "made_by": made}
    about = card.About("a", None, weights(tmp_path, MADE | series))
    text = card.readme(hostile, about, WHISPER).split("---\n", 2)[2]
    assert "\n# c" not in text and not re.search(r"(?<!\\)<", text.split("## Use")[0])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {6}


@pytest.mark.parametrize(
    ("told", "language", "says"),
    [
        ("ln", "ln", "It is trained with Whisper's token of ln (Lingala)."),
        ("mdw=ln", "mdw", "Its language has no token in Whisper: it is trained with Whisper's"),
    ],
)
def test_a_borrowed_token_is_not_the_language(told, language, says, tmp_path, capsys):
    tokenizer = train_bpe(["a b"], 300, told)
    config = formats.make_config(16, (1, 1), 2, vocabulary=tokenizer.size)
    info = whisper.ModelInfo(config, tokenizer.state(), 0, {}, pretrained=True, pad_to_30s=True)
    family = whisper.Family(SimpleNamespace(origin=None))
    about = family.about(info, card.About("a", None, tmp_path / "best.safetensors"))
    text = card.readme("a", about, WHISPER)
    assert block_of(text)["language"] == [language] and says in text
    whisper.say_language(tokenizer)
    assert f"language of the texts: {language}" in capsys.readouterr().out


def test_rows_in_a_language_without_a_token_are_refused_with_their_number(capsys):
    tokenizer = train_bpe(["a b"], 300, "ln", ["en"])
    corpus = SimpleNamespace(languages=Codes(["English", "mdw", "", "mdw"]))
    with pytest.raises(DataError, match=r"train set: .* 'mdw' \(2 rows\).*--language mdw=ln"):
        whisper.check_languages({"train": corpus}, tokenizer)
    tokenizer = train_bpe(["a b"], 300, "mdw=ln", ["en"])
    whisper.check_languages({"train": corpus}, tokenizer)
    assert "languages of rows: English as en, mdw as ln" in capsys.readouterr().out
