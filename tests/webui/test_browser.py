"""The page in a real browser: a user who types no command checks data, trains, stops, resumes, and
tries and exports the results; the server is killed in between. Only this machine is asked.

Run them with `./run_tests.sh -m browser`."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import soundfile

ROOT = Path(__file__).parents[2]
WAIT = 180_000  # milliseconds
SMALL = {"--d_model": "32", "--encoder_layers": "1", "--decoder_layers": "1"}
LEARN_FROM = "Recordings to learn from"
PARTS = "Failed to fetch dynamically imported module"
MORE = re.compile("^More: ")  # what is folded on the Train tab
pytestmark = pytest.mark.browser


# --- data -----------------------------------------------------------------------------------------


def tones(text: str, random: np.random.Generator) -> np.ndarray:
    """A tone for each letter, at 16 kHz."""
    time_of = np.arange(1600) / 16_000
    parts = [np.sin(2 * np.pi * (300 + 40 * (ord(letter) - 97)) * time_of) for letter in text]
    return 0.3 * np.concatenate(parts) + random.normal(0, 0.003, 1600 * len(text))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """--data with sixty utterances, five of which are bad, and --runs."""
    folder = tmp_path_factory.mktemp("page")
    data, runs = folder / "data", folder / "runs"
    (data / "audio").mkdir(parents=True)
    random = np.random.default_rng(0)
    rows = []
    for number in range(60):
        text = "".join(random.choice(list("abcdefgh"), 8))
        name = f"audio/{number:02d}.wav"
        soundfile.write(data / name, tones(text, random), 16_000)
        rows.append({"audio_filepath": name, "text": text, "speaker": "ab"[number % 2]})
    soundfile.write(data / "audio/silent.wav", np.zeros(16_000), 16_000)
    soundfile.write(data / "audio/short.wav", np.ones(200), 16_000)
    (data / "audio/text.wav").write_text("this is not audio")
    evil = "<img src=x onerror=document.title='evil'>.wav"
    soundfile.write(data / "audio" / evil, np.zeros(16_000), 16_000)
    for name in ("silent.wav", "short.wav", "text.wav", "missing.wav", evil):
        rows.append({"audio_filepath": f"audio/{name}", "text": "abc", "speaker": "a"})
    lines = [json.dumps(row) + "\n" for row in rows]
    (data / "train.json").write_text("".join(lines), encoding="utf-8")
    return data, runs


# --- the server and the browser -------------------------------------------------------------------


class Server:
    """The program, as the script starts it."""

    def __init__(self, data: Path, runs: Path, port: int = 0):
        words = ["webui/app.py", "--port", str(port), "--data", str(data), "--runs", str(runs)]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.address = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def servers(folders):
    """The servers of this module; the last one answers."""
    started = [Server(*folders)]
    yield started
    for server in started:
        server.kill()


@pytest.fixture
def page(browser, servers):
    """An open page. Requests to other machines are blocked and fail the test, as do errors."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    foreign = []
    problems = []

    def answer(route) -> None:
        if urlsplit(route.request.url).hostname == "127.0.0.1":
            route.continue_()
        else:
            foreign.append(route.request.url)
            route.abort()

    context.route(re.compile("^(https?|wss?):"), answer)
    page = context.new_page()
    # A server that is killed may not have sent all parts of the page.
    page.on("pageerror", lambda error: PARTS in str(error) or problems.append(str(error)))
    page.goto(servers[-1].address)
    page.set_default_timeout(WAIT)
    yield page
    context.close()
    assert not foreign and not problems, (foreign, problems)


def picture(page, name: str) -> None:
    """Keeps a picture in the folder that the environment variable PICTURES names."""
    if folder := os.environ.get("PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def tab(page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def choose(page, label: str, value: str) -> None:
    """Chooses a value in a dropdown by the keyboard."""
    field = shown(page.get_by_role("combobox", name=label, exact=True))
    field.focus()
    # The server may still send the choices, which would undo what is typed before they come.
    page.get_by_role("option", name=value).first.wait_for()
    field.fill(value)
    field.press("Enter")
    expect_value(page, label, "combobox", value)


def fill(page, label: str, value: str) -> None:
    shown(page.get_by_role("textbox", name=re.compile(rf"^{label}\b"))).fill(value)


def shown(found):
    """The visible one of several controls, which are on different tabs."""
    return found.filter(visible=True).first


def press(page, name: str | re.Pattern) -> None:
    shown(page.get_by_role("button", name=name, exact=True)).click()


def see(page, text: str | re.Pattern) -> None:
    shown(page.get_by_text(text)).wait_for()


# --- the tests ------------------------------------------------------------------------------------


def test_from_data_to_a_recogniser(page, folders, servers):
    data, runs = folders
    tab(page, "Data")
    choose(page, "Table of the recordings", "train.json")
    press(page, "Check")
    see(page, re.compile("5 rejected"))
    see(page, "audio is silent")
    picture(page, "data")
    player = page.locator("audio").first.get_attribute("src")
    assert page.request.get(page.url + player).headers["content-type"] == "audio/wav"
    press(page, "Train with these data")

    expect_value(page, LEARN_FROM, "combobox", "train.json")  # the form is made anew
    press(page, MORE)
    fill(page, "--max_steps", "300")
    press(page, re.compile("^Model"))
    for label, value in SMALL.items():
        fill(page, label, value)
    for title in (MORE, re.compile("^Model")):
        press(page, title)  # what is folded again is kept
    choose(page, "GPU to predict for", "8gb")
    press(page, "Will it fit?")
    see(page, "It fits.")
    picture(page, "train")
    fill(page, "Name of the run", "first")
    press(page, "Start")
    expect_state(page, "first", "running")
    page.locator(".plot polyline.line").first.wait_for()

    page.reload()
    tab(page, "Runs")
    press(page, "Stop and save")
    expect_state(page, "first", "stopped")
    press(page, "Resume")
    expect_state(page, "first", "running")
    servers[-1].kill()
    servers.append(Server(data, runs))
    page.goto(servers[-1].address)
    tab(page, "Runs")
    expect_state(page, "first", "finished")
    picture(page, "runs")
    log = (runs / "first" / "run.log").read_text(encoding="utf-8")
    assert "resuming from" in log and log.count("step 300/300") == 1

    tab(page, "Try")
    page.locator("input[type=file]").filter(visible=False).last.wait_for(state="attached")
    upload(page, "Recording", data / "audio" / "00.wav")
    press(page, "Transcribe")
    see(page, "The worst utterances of the last evaluation")
    expect_value(page, re.compile("^Transcript"))
    picture(page, "try")
    assert page.title() == "Speech recipes"  # the name of a bad file is HTML that would change it


def upload(page, label: str, file: Path) -> None:
    """Gives a file to the visible control with this label."""
    block = page.locator(".block").filter(has=page.get_by_text(label, exact=True))
    shown(block).locator("input[type=file]").first.set_input_files(file)
    shown(block).locator("audio, [data-testid^=waveform]").first.wait_for(state="attached")


def expect_value(page, label: str | re.Pattern, role: str = "textbox", wanted: str = "") -> None:
    """Waits until a control has a text, or the `wanted` one."""
    field = shown(page.get_by_role(role, name=label))
    end = time.monotonic() + WAIT / 1000
    while not field.input_value() or wanted not in field.input_value():
        assert time.monotonic() < end, f"{label} stays {field.input_value()!r}"
        time.sleep(0.2)


def expect_state(page, run: str, word: str) -> None:
    """Waits until the table of runs has this word for a run."""
    row = page.locator("tr").filter(has=page.get_by_text(run, exact=True))
    row.get_by_text(word, exact=True).first.wait_for()


@pytest.fixture
def whisper(folders) -> subprocess.Popen:
    """A run of one update from a command line, which is there when the process has ended."""
    data, runs = folders
    words = ["recipes/whisper_vietnamese.py", "--from_scratch", "--language", "vi"]
    words += ["--model_size", "demo"]
    words += ["--train_manifest", data / "train.json", "--max_steps", "1"]
    words += ["--output_dir", runs / "whisper", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, env=environment)
    yield process
    process.kill()


def test_a_draft_is_corrected_and_trained_on(page, folders):
    """After the test above: its recogniser writes the draft of two dropped recordings."""
    data, runs = folders
    tab(page, "Data")
    files = [data / "audio" / f"{number:02d}.wav" for number in (0, 1)]
    page.set_input_files("input[type=file] >> nth=0", files)
    see(page, "A table of their texts is missing")
    press(page, re.compile("^There are no texts yet"))
    expect_value(page, "Weights", "combobox", "best evaluation")
    press(page, "Write a draft")
    expect_state(page, "draft_1", "finished")
    see(page, re.compile("its texts are in the table draft_1/draft.jsonl"))
    tab(page, "Data")
    choose(page, "Table of the recordings", "draft_1/draft.jsonl")
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="Listen and correct the texts").click()
    editor = opened.value
    editor.get_by_label("Text", exact=True).nth(1).fill("abcdefgh")
    editor.keyboard.press("Control+Enter")
    editor.get_by_text("2 texts, 1 done, 0 left out; all is saved").wait_for()
    see(page, re.compile("1 of 2 texts are done"))
    saved = (runs / "draft_1" / "corrected.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in saved][1] == "abcdefgh"
    press(page, "Train with these data")
    expect_value(page, LEARN_FROM, "combobox", "draft_1/corrected.jsonl")


def test_an_old_tab_says_why_it_is_dead(page, folders, servers):
    """The page is started again at the same address, while the tab is idle."""
    playwright = pytest.importorskip("playwright.sync_api")
    port = urlsplit(servers[-1].address).port
    tab(page, "Data")
    with contextlib.suppress(playwright.TimeoutError):  # until the tab has fetched all of its parts
        while True:
            page.wait_for_event("request", lambda request: "/assets/" in request.url, timeout=5000)
    servers[-1].kill()
    servers.append(Server(*folders, port))
    page.get_by_role("dialog").get_by_text("The page was started again").wait_for()


def test_speech_and_an_export(page, whisper):
    """Matcha after two updates: what it says is noise, but it speaks. Whisper is exported for other
    programs."""
    tab(page, "Train")
    choose(page, "Recipe", "matcha_voice")
    shown(page.get_by_role("button", name=re.compile("^Speaking", re.IGNORECASE))).wait_for()
    press(page, MORE)  # its own form
    fill(page, "--max_steps", "2")
    press(page, re.compile("^Data"))
    fill(page, "--max_samples", "60")
    fill(page, "Name of the run", "voice")
    press(page, "Start")
    expect_state(page, "voice", "finished")
    tab(page, "Try")
    fill(page, "Text", "ሰላም ለዓለም።")
    press(page, "Speak")
    player = shown(page.get_by_label(re.compile("Play 0001.wav")))
    sound = page.request.get(page.url + player.get_attribute("src"))
    assert sound.headers["content-type"] == "audio/wav" and len(sound.body()) > 10_000
    picture(page, "try_speech")

    assert whisper.wait(WAIT / 1000) == 0
    tab(page, "Export")
    choose(page, "Run", "whisper")
    press(page, "Export")
    link = page.get_by_role("link", name="Download model.safetensors", exact=True)
    answer = page.request.get(page.url + link.get_attribute("href"))
    assert answer.status == 200 and len(answer.body()) > 100_000
    picture(page, "export")


def test_runs_are_chosen_by_a_click_and_removed_together(page, folders):
    _, runs = folders
    tab(page, "Runs")
    for name in ("first", "voice"):
        press(page, name)
        page.get_by_role("heading", name=name, exact=True).wait_for()
        expect_value(page, "Run", "combobox", name)
    press(page, re.compile("^Stop or remove several runs"))
    press(page, "Remove them for good")
    see(page, "choose the runs first")
    page.get_by_test_id("toast-close").click()
    field = shown(page.get_by_role("combobox", name="Runs", exact=True))
    for name in ("draft_1", "voice"):
        field.click()
        page.get_by_role("option", name=name, exact=True).click()
    press(page, "Stop and save them")
    see(page, "draft_1 does not run; voice does not run")
    page.get_by_test_id("toast-close").click()
    press(page, "Remove them for good")
    see(page, re.compile("^draft_1 has texts that somebody has corrected: take them home first"))
    page.get_by_role("button", name="voice", exact=True).wait_for(state="detached")
    assert (runs / "draft_1/corrected.jsonl").is_file() and not (runs / "voice").exists()
