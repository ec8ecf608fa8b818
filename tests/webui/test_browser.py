"""The page in a real browser: a user who types no command checks data, trains, stops, resumes, and
tries and exports the results; the server is killed in between. Only this machine is asked.

Run them with `./run_tests.sh -m browser`."""

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
MORE = re.compile("^More: ")  # what is folded on the Train tab
FONT = "body, .gradio-container { font-size: 32px !important }"
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

    def __init__(self, data: Path, runs: Path):
        words = ["webui/app.py", "--port", "0", "--data", str(data), "--runs", str(runs)]
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
    page.on("pageerror", lambda error: problems.append(str(error)))
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
    words = ["recipes/whisper_vietnamese.py", "--from_scratch", "--model_size", "demo"]
    words += ["--train_manifest", data / "train.json", "--max_steps", "1"]
    words += ["--output_dir", runs / "whisper", "--device", "cpu", "--no_tensorboard"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, env=environment)
    yield process
    process.kill()


def test_speech_and_an_export(page, whisper):
    """XTTS from scratch, two updates of each stage: what it says is noise, but it speaks. Whisper
    is exported for other programs."""
    tab(page, "Train")
    choose(page, "Recipe", "xtts_amharic")
    press(page, MORE)
    shown(page.get_by_role("combobox", name="--use_amharic_g2p")).wait_for()
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

    tab(page, "Export")
    press(page, "Export")
    see(page, re.compile("the model has no vocoder"))
    page.locator(".toast-close").click()
    assert whisper.wait(WAIT / 1000) == 0
    tab(page, "Runs")
    tab(page, "Export")
    choose(page, "Run", "whisper")
    press(page, "Export")
    link = page.get_by_role("link", name="Download model.safetensors", exact=True)
    answer = page.request.get(page.url + link.get_attribute("href"))
    assert answer.status == 200 and len(answer.body()) > 100_000
    picture(page, "export")
