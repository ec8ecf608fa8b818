"""The Data tab without a browser: what its buttons do."""

import re

import gradio as gr
import pytest

from webui import catalogue, corrections
from webui.checked import Example, Row, Section
from webui.context import Context
from webui.tabs import data
from webui.tabs.shared import Shared

HARMFUL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def recipes():
    return catalogue.find_recipes()


@pytest.fixture
def page(here, recipes):
    """The page, and call(name, *values), which does what an event's action of this name does."""
    with gr.Blocks() as page:
        settings, chosen = gr.State({}), gr.State("")
        with gr.Tabs() as tabs, gr.Tab("Data", id="data") as tab:
            data.build(Context(here, recipes, None), Shared(tabs, tab, settings, chosen))
    actions = {each.fn.__name__: each.fn for each in page.fns.values()}
    return page, lambda name, *values: actions[name](*values)


def table_of(here, name: str, wav) -> str:
    path = here.data / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{wav(path.parent / f'{i}.wav', 1 + i)}|text {i}|Ann" for i in range(3)]
    lines.append(f"{HARMFUL}.wav|gone|Ann")
    path.write_text("\n".join(["audio_file|text|speaker", *lines]))
    return name


def test_every_control_has_a_label(page):
    controls = [
        each for each in page[0].blocks.values() if isinstance(each, gr.components.Component)
    ]
    shown = [each for each in controls if not isinstance(each, gr.State | gr.Markdown)]
    assert len(shown) > 10
    assert all(getattr(each, "label", "") or getattr(each, "value", "") for each in shown)


def test_a_check_and_what_is_trained(page, here, wav):
    _, call = page
    name = table_of(here, "small/train.csv", wav)
    options = [""] * len(data.OPTIONS)
    html, printed = call("run_check", name, None, "konkani_conformer", *options)
    assert "2 utterances in train, 1 utterances in val can be used" in html
    assert "\n" not in html and "file is missing" in html and "file is missing" in printed
    assert "<img" not in html and "&lt;img src=x onerror=alert(1)&gt;" in html
    assert "Utterances by length" in html and "Minutes by speaker" in html
    settings, _ = call("to_training", {}, name, None, "konkani_conformer", *options)
    assert settings == {"recipe": "konkani_conformer", "values": {"train_manifest": name}}
    options[0] = "en"
    before = {"recipe": "xtts_amharic", "tier": "8gb", "values": {"seed": "3", "language": "am"}}
    settings, _ = call("to_training", before, name, name, "xtts_amharic", *options)
    values = {"seed": "3", "train_manifest": name, "val_manifest": name, "language": "en"}
    assert settings == {"recipe": "xtts_amharic", "tier": "8gb", "values": values}
    settings, _ = call("to_training", before, name, None, "konkani_conformer", *options)
    assert settings["values"] == {"train_manifest": name}  # it has no option for a language


def test_files_of_annotations_are_checked_and_trained(page, here, wav):
    _, call = page
    for name in ("a.srt", "b.kok.srt"):
        wav(here.data / "talks" / f"{name[0]}.wav", 9.0)
        (here.data / "talks" / name).write_text(
            "".join(f"{i}\n00:00:0{i},000 --> 00:00:0{i},9\ntext {i}\n\n" for i in range(9))
            + "9\n00:00:08,500 --> 00:00:12,000\nlate\n"
        )
    options = [""] * len(data.OPTIONS)
    html, _ = call("run_check", "talks/*.srt", None, "konkani_conformer", *options)
    assert "17 utterances in train, 1 utterances in val can be used" in html
    assert "segment ends beyond the file" in html and "a.wav at 8.50 s" in html
    assert "<audio" in html and "2 files" in html
    settings, _ = call("to_training", {}, "talks/*.srt", None, "konkani_conformer", *options)
    assert settings["values"] == {"train_manifest": "'talks/*.srt'"}
    options[list(data.OPTIONS).index("tier")] = "Anna"
    html, _ = call("run_check", "talks/a.srt", None, "konkani_conformer", *options)
    assert "none of the manifests is an .eaf or a .TextGrid" in html


def test_what_cannot_be_checked(page, here, wav, tmp_path):
    _, call = page
    options = [""] * len(data.OPTIONS)
    (tmp_path / "secret.csv").write_text("audio_file,text\na.wav,one\n")
    for name in (None, "", "gone.csv", "../secret.csv", str(tmp_path / "secret.csv"), "/dev/zero"):
        with pytest.raises(gr.Error):
            call("begin", name, None, "konkani_conformer", *options)
    with pytest.raises(gr.Error, match="for which training"):
        call("begin", table_of(here, "t.csv", wav), None, None, *options)
    with pytest.raises(gr.Error, match="outside"):
        folder = [*options[:-1], str(tmp_path)]
        call("run_check", "t.csv", None, "konkani_conformer", *folder)
    html, _ = call("run_check", "t.csv", "t.csv", "whisper_morse", *options)
    assert "audio is in the training set, too" in html


def test_a_folder_and_the_table_beside_it(page, here, wav):
    _, call = page
    for name in ("dev.csv", "train.csv", "other.csv"):
        table_of(here, f"cv/{name}", wav)
    table, evaluation = call("pick", "cv")
    assert table.value == "cv/train.csv" and evaluation.value == "cv/dev.csv"
    table, evaluation = call("pick", "cv/other.csv")
    assert table.value == "cv/other.csv" and evaluation.value is None
    (here.data / "empty").mkdir()
    with pytest.raises(gr.Error, match="no table"):
        call("pick", "empty")
    assert call("pick", None)[0].value is None


def test_uploads(page, here, wav, tmp_path):
    _, call = page
    clip = wav(tmp_path / "0.wav")
    table = tmp_path / "0.csv"
    table.write_text(f"audio_file|text\n{HARMFUL}.wav|one\nlost.wav|two\n")
    assert call("upload", [])[-1] == data.HELP
    *_, said = call("upload", [(clip, f"{HARMFUL}.wav")])
    assert "A table of their texts is missing" in said and not here.uploads()
    chosen, *_, said = call("upload", [(clip, f"{HARMFUL}.wav"), (str(table), "t.csv")])
    assert chosen.value == "uploads/1/manifest.jsonl" and "<img" not in said
    assert "lost.wav" in said and "file was not uploaded" in said
    options = [""] * len(data.OPTIONS)
    html, _ = call("run_check", chosen.value, None, "konkani_conformer", *options)
    assert "These data cannot be used yet" in html and "lost.wav" in html  # one clip is too few
    assert call("refresh")[2].choices == [("uploads/1", "uploads/1")]
    call("removed", "uploads/1")
    assert not here.uploads()


def test_an_upload_that_is_refused_says_so_until_the_next_one(page, here, wav, tmp_path):
    _, call = page
    clip, table = wav(tmp_path / "0.wav"), tmp_path / "0.csv"
    table.write_text("audio_file|text\n1.wav|one\n")
    pairs = [(clip, "1.wav"), (str(table), "t.csv")]
    *_, said = call("upload", [*pairs, (str(table), HARMFUL + ".csv")])
    assert "Not uploaded: these are several tables" in said and "<img" not in said
    *_, said = call("upload_folder", [*pairs, (clip, "1.wav")])
    assert "several files in this folder are called 1.wav" in said and not here.uploads()
    *_, said = call("upload_folder", pairs)
    assert "Uploaded." in said and here.uploads() == ["uploads/1"]


def test_a_draft_is_trained_on_in_pieces(page, here, wav, json_lines):
    _, call = page
    (here.runs / "one").mkdir()
    row = {"file": wav(here.data / "a.wav"), "text": "one", "pieces": []}
    json_lines(here.runs / "one/draft.jsonl", [row])
    options = [""] * len(data.OPTIONS)
    name = "one/draft.jsonl"
    first, *others = re.findall('href="([^"]+)"', call("follow", name, "", ""))
    assert first == "editor?table=one%2Fdraft.jsonl"
    assert others[0] == "home?table=one%2Fdraft.jsonl&amp;form=.eaf" and len(others) == 4
    settings, _ = call("to_training", {}, name, None, "konkani_conformer", *options)
    assert settings["values"] == {"train_manifest": name, "use_chunking": "on"}
    change = {"numbers": [0], "known": [["one"]], "rows": [{"text": "two", "edited": "done"}]}
    corrections.replace(here, corrections.Table(here.runs / name), [change])
    said = call("follow", name, "", "")
    assert "1 of 1 texts are done, 0 are left out" in said
    assert call("follow", name, "", said) == gr.skip()
    for name in ("one/draft.jsonl", "one/corrected.jsonl"):
        settings, _ = call("to_training", {}, name, None, "konkani_conformer", *options)
        assert settings["values"]["train_manifest"] == "one/corrected.jsonl"


def test_texts_are_shown_as_text(here, wav):
    clip = here.data / f"{HARMFUL}.wav"
    wav(clip)
    rows = [Row(1, HARMFUL, HARMFUL, [HARMFUL])]
    sections = [
        Section(f"{HARMFUL}: 1 rejected:", rows),
        Section(f"minutes by {HARMFUL}:", [Row(1, HARMFUL)]),
        Section(f"warning: {HARMFUL}"),
        Section(f"checked: {HARMFUL}"),
    ]
    examples = {HARMFUL: Example(HARMFUL, clip, 0.0, 1.0)}
    for problem in ("", HARMFUL):
        html = data._report(here, list(sections), examples, problem)
        assert "<img" not in html.lower() and html.count("&lt;img") >= 7
        assert "<audio" in html and "%3Cimg" in html
