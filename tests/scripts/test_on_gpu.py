"""The measurement on a GPU, as far as it can be seen on a CPU: its pieces, results and tables."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import on_gpu, tier_tables
from benchmarks.gpu import bench, card, correctness, report, results, speed, trial
from benchmarks.gpu.bench import Bench, Failed, OutOfTime, Piece, Skipped
from common.options import LEVELS
from tests.recipes import runs

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "benchmarks/on_gpu.py"
WORDS = [
    *runs.PLAIN,
    *runs.TINY,
    *("--batch_size 4 --gradient_accumulation_steps 2 --max_duration 1 --dropout 0").split(),
    *("--log_every", "1", "--dry_run", "8gb"),
]


@pytest.fixture
def made(tmp_path) -> Bench:
    """A bench on the CPU with an output file."""
    found = Bench("cpu", minutes=5)
    found.card = {"gib": 8.0}
    found.gib = 8.0
    found.results = results.Results(tmp_path / "gpu.json", "a card", "2.11")
    return found


def pieces_of(path: Path) -> dict:
    return results.read(path)[-1]["pieces"]


# --- trials ---------------------------------------------------------------------------------------


def tried(tmp_path, monkeypatch, *flags: str, **wanted) -> dict:
    """What a trial of a tiny Konkani model finds."""
    folder = tmp_path / "_".join(["trial", *map(str, wanted), *flags]).replace("/", "_")
    folder.mkdir()
    monkeypatch.chdir(folder)
    output = folder / "found.json"
    torch.manual_seed(0)
    trial.run("konkani_conformer", [*WORDS, *flags], trial.Wanted(str(output), **wanted))
    return json.loads(output.read_text())


def test_a_trial_makes_updates_and_short_memory_changes_no_loss(tmp_path, monkeypatch):
    whole = tried(tmp_path, monkeypatch, updates=3, flops=True, largest=8)
    assert len(whole["losses"]) == len(whole["seconds"]) == 3 and whole["utterances"] == 8
    assert whole["losses"][2] < whole["losses"][0] and whole["longest"] == pytest.approx(1.11)
    assert whole["flops"] > 1e6 and whole["largest"] == 8 and whole["short_of_memory"] == 0
    short = tried(tmp_path, monkeypatch, updates=3, short_of_memory_at=2)
    assert short["short_of_memory"] == 1
    assert short["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_a_trial_of_files_reads_noise_and_stops_in_time(tmp_path, monkeypatch):
    found = tried(tmp_path, monkeypatch, updates=1000, micro_batches=0, most_seconds=0.0)
    assert len(found["losses"]) == 1 and found["utterances"] == 8
    assert found["waited"][0] > 0 and "longest" not in found


def test_the_weights_with_each_level_of_offloading_are_those_without(tmp_path, monkeypatch):
    states = {}
    for level in ("", *LEVELS):
        path = tmp_path / f"weights_{level}.pt"
        flags = ["--use_cpu_offload", level] if level else []
        tried(tmp_path, monkeypatch, *flags, updates=2, weights=str(path))
        states[level] = torch.load(path, weights_only=True)
        assert correctness.weights_differ(states[level], states[""]) == 0
    unchanged = {"after": states[""]["before"]}
    assert correctness.weights_differ(unchanged, states[""]) == pytest.approx(1)


def test_every_recipe_with_presets_is_measured():
    recipes = {Path(script.page).stem for script in tier_tables.SCRIPTS.values()}
    assert {demo.recipe for demo in correctness.DEMOS.values()} == recipes - {"xtts_amharic"}
    assert {script for script, _ in speed.SIZES.values()} == {*tier_tables.SCRIPTS}
    for line in ("clips/val_1.wav ሰላም", "test set: duration 1  flow 2.3"):
        assert correctness.is_result(line)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", correctness.DEMOS)
def test_each_recipe_trains_on_a_gpu_with_each_level_of_offloading(made, name):
    made.device, made.is_small = "cuda", False
    found = correctness.offload(made, correctness.DEMOS[name])
    for level in LEVELS:
        assert found[f"{level} differs by"] < 0.2, found


# --- pieces ---------------------------------------------------------------------------------------


def test_every_recipe_has_its_pieces():
    recipes = {path.stem for path in (bench.ROOT / "recipes").glob("*.py")} - {"template"}
    assert {demo.recipe for demo in correctness.DEMOS.values()} == recipes - {"xtts_amharic"}
    assert speed.SIZES.keys() == {*correctness.DEMOS, "xtts"}


def test_each_piece_is_written_when_it_is_done_and_is_not_measured_again(made, tmp_path):
    path = tmp_path / "gpu.json"
    order = []

    def piece(name: str, result) -> Piece:
        def measure(bench: Bench) -> dict:
            order.append(name)
            if name != "first":
                assert "first" in pieces_of(path)
            if isinstance(result, Exception):
                raise result
            return result

        return Piece(name, measure, seconds=1)

    pieces = [
        piece("first", {"x": 1}),
        piece("second", Skipped("there is no row")),
        piece("third", Failed("status 1: out of memory")),
        piece("fourth", ZeroDivisionError("a fault")),
        piece("fifth", {"x": 5}),
    ]
    made.measure(pieces)
    status = {name: entry["status"] for name, entry in pieces_of(path).items()}
    assert list(status.values()) == ["done", "skipped", "failed", "failed", "done"]
    assert "ZeroDivisionError: a fault" in pieces_of(path)["fourth"]["reason"]
    order.clear()
    made.results = results.Results(path, "a card", "2.11")
    made.measure(pieces)
    assert order == ["second"]  # what was skipped is tried again
    made.results = results.Results(path, "a card", "2.11", retry=True)
    made.measure(pieces)
    assert order[1:] == ["second", "third", "fourth"]
    made.results = results.Results(path, "another card", "2.11")
    made.measure(pieces[:1])
    assert order[-1] == "first" and len(results.read(path)) == 2


def test_a_piece_without_time_is_skipped_with_the_reason(made, tmp_path):
    made.device, made.is_small = "cuda", False
    made.deadline = time.monotonic() + 30
    made.measure([Piece("long", lambda bench: {}, 60), Piece("brief", lambda bench: {}, 5)])
    found = pieces_of(tmp_path / "gpu.json")
    assert found["long"]["status"] == "later"
    assert found["long"]["reason"].startswith("it takes about 60 s, and 30 s are left")
    assert found["brief"]["status"] == "done"


def test_pieces_run_beside_each_other_as_far_as_the_card_allows(made, monkeypatch):
    monkeypatch.setattr(bench, "JOBS", 3)

    def piece(gib: float = 3.0, alone: bool = False) -> Piece:
        return Piece("", lambda bench: {}, 1, gib, alone)

    assert made.may_start(piece(20.0), [])
    assert made.may_start(piece(), [piece()])
    assert not made.may_start(piece(), [piece(), piece()])
    assert not made.may_start(piece(1), [piece(1)] * 3)
    assert not made.may_start(piece(alone=True), [piece()])
    assert not made.may_start(piece(), [piece(alone=True)])


HANGS = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
open("pid", "w").write(str(child.pid))
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def assert_ends(pid: int) -> None:
    """A process that was killed is there until its parent, or init, has waited for it."""
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(pid)


def test_a_child_that_takes_too_long_is_killed_with_its_children(made, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    made.deadline = time.monotonic() + 3
    with pytest.raises(OutOfTime):
        made.child({"run": [str(tmp_path / "hangs.py")]}, tmp_path, 60)
    assert_ends(int((tmp_path / "pid").read_text()))
    assert not made.children


def test_a_child_ends_with_its_parent_even_if_that_is_killed(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    asked = {"run": [str(tmp_path / "hangs.py")]}
    code = (
        "import sys; from pathlib import Path; from benchmarks.gpu.bench import Bench;"
        f"Bench('cpu', 5).child({asked!r}, Path({str(tmp_path)!r}), 600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    runs.wait_until(parent, lambda: (tmp_path / "pid").exists())
    parent.kill()
    parent.wait()
    assert_ends(int((tmp_path / "pid").read_text()))


def test_a_failed_child_says_why(made, tmp_path):
    (tmp_path / "fails.py").write_text("import sys; sys.exit('error: no such card')")
    with pytest.raises(Failed, match="status 1: error: no such card"):
        made.child({"run": [str(tmp_path / "fails.py")]}, tmp_path, 60)


def test_the_order_of_the_pieces_is_that_of_what_matters(made, monkeypatch):
    made.device, made.is_small, made.gib = "cuda", False, 79.1
    names = [piece.name for piece in on_gpu.pieces(made)]
    assert len(names) == len(set(names))
    kinds = list(dict.fromkeys(name.split()[0] for name in names))
    assert kinds == "agreement resume offload short row speed 200 export largest peer".split()
    rows = [name for name in names if name.startswith("row ")]
    tiers = {name.split()[2] for name in rows}
    assert {"4gb", "8gb", "a100"} <= tiers
    made.gib = 7.7
    smaller = [name for name in map(lambda piece: piece.name, on_gpu.pieces(made))]
    assert {name.split()[2] for name in smaller if name.startswith("row ")} == {"4gb", "6gb", "8gb"}


# --- results and tables ---------------------------------------------------------------------------


def test_a_peak_is_found_by_the_whole_name():
    assert card.known_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert card.known_peak("NVIDIA H100 PCIe") == 756e12
    assert card.known_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert card.known_peak("Tesla T4") == 65e12
    assert card.known_peak("NVIDIA A1000") is None


ROW = {
    "key": "run_xtts_amharic.sh 16gb full",
    "row": "8 x 30",
    "predicted": 12.24,
    "cap": 15 * 2**30,
    "peak_allocated": 12 * 2**30,
    "peak_reserved": 13 * 2**30,
    "short_of_memory": 0,
}


def run_of(**pieces) -> dict:
    entries = {
        name.replace("_", " "): {"status": "done", "found": found, "seconds": 1}
        for name, found in pieces.items()
    }
    return {"card": "H100", "torch": "2.11", "source": "abc", "pieces": entries}


def test_the_tables_name_what_is_missing_with_the_reason():
    run = run_of(row_xtts=ROW)
    run["pieces"]["peer whisper"] = {"status": "skipped", "reason": "no transformers", "seconds": 0}
    for name in ("a", "b"):
        run["pieces"][name] = {"status": "later", "reason": "no time", "seconds": 0}
    text = report.text_of(run)
    assert text.endswith("- no time until now: a, b")
    assert "## H100, torch 2.11, source abc" in text
    row = "| run_xtts_amharic.sh 16gb full | 8 x 30 | 12.24 | 12.00 | 1.020 | 13.00 | 15.00 | - |"
    assert row in text
    assert "- peer whisper: skipped: no transformers" in text


def test_only_rows_that_fitted_under_their_cap_count_as_measured(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text('{"other 8gb full": {"row": "1 x 1", "gib": 1.0, "card": "T4"}}')
    run = run_of(
        row=ROW,
        row_2={**ROW, "key": "a", "short_of_memory": 1},
        row_3={**ROW, "key": "b", "cap": 0},
        row_4={**ROW, "key": "c", "failed": "killed"},
    )
    assert report.write_measured(run, path) == 1
    assert json.loads(path.read_text()) == {
        "other 8gb full": {"row": "1 x 1", "gib": 1.0, "card": "T4"},
        ROW["key"]: {"row": "8 x 30", "gib": 12.0, "card": "H100"},
    }


def test_a_page_says_what_was_measured_and_on_which_card(tmp_path, monkeypatch):
    script = "run_xtts_amharic.sh"
    place, other, *_ = tier_tables.planned_rows(tier_tables.read_rows(script))
    entry = {"row": place[2], "gib": 12.34, "card": "NVIDIA H100"}
    stale = {"row": "1 x 240", "gib": 99.99, "card": "Tesla T4"}  # of a row that has changed
    entries = {f"{script} {place[0]} {place[1]}": entry, f"{script} {other[0]} {other[1]}": stale}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(entries))
    gib = {row[:2]: 1.0 for row in tier_tables.planned_rows(tier_tables.read_rows(script))}
    monkeypatch.setattr(tier_tables, "memory", lambda *_: gib)
    before = tier_tables.table_of(script)
    assert "not measured on these GPUs" in before and "(12.34)" not in before
    monkeypatch.setattr(tier_tables, "measured_file", lambda: path)
    table = tier_tables.table_of(script)
    assert table.count(f"{place[2]}, 1.0 (12.34)") == 1 and "99.99" not in table
    note = " ".join(table.split())
    assert "*measured* by `python benchmarks/on_gpu.py` on NVIDIA H100, which was left" in note
    assert "not measured on these GPUs" not in note and "T4," not in note


# --- the command ----------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_in_one_line(tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match=r"^error: ") as missing:
        card.measure("cuda")

    def child(bench: Bench, *arguments) -> str:
        raise Failed(f"status 1: a warning\n{missing.value}")

    monkeypatch.setattr(Bench, "child", child)
    args = on_gpu.make_parser().parse_args(["--output", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit) as end:
        on_gpu.run_all(args)
    assert str(end.value) == str(missing.value) and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("only", ["t konkani", pytest.param("", marks=pytest.mark.slow)])
def test_all_pieces_run_at_a_small_size_killed_and_continued(tmp_path, only):
    path = tmp_path / "gpu.json"
    command = [sys.executable, COMMAND, "--device", "cpu", "--minutes", "60", "--only", only]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    while len(pieces_of(path)) < 2 if path.exists() else first.poll() is None:
        time.sleep(0.2)
    os.kill(first.pid, signal.SIGKILL)
    before = {name: each for name, each in pieces_of(path).items() if name != "card"}
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = pieces_of(path)
    assert {name: found[name] for name in before} == before
    failed = {name: each for name, each in found.items() if each["status"] == "failed"}
    assert not failed
    assert only or ("### Speed" in ran.stdout and "### Memory of the rows" in ran.stdout)
