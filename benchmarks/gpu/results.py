"""gpu.json: what on_gpu.py has found, one entry for each piece.

    {"runs": [{"card": ..., "torch": ..., "source": ..., "pieces": {name: entry}}]}

An entry has "status" (done, failed, skipped, or later: there was no time), "seconds", and "found"
or "reason". A run is of one card, one torch and one state of the programs that are measured."""

import hashlib
import json
import threading
from pathlib import Path

from common.files import write_text

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("common", "speech", "dry_run", "recipes", "benchmarks/gpu")


def source() -> str:
    """A hash of the programs that are measured: results of others are not continued."""
    content = hashlib.sha1()
    paths = [path for folder in MEASURED for path in (ROOT / folder).rglob("*.py")]
    for path in sorted([*paths, *ROOT.glob("run_*.sh"), ROOT / "common/env.sh"]):
        if path.name == "report.py" and path.parent.name == "gpu":
            continue  # it only prints what was measured
        content.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return content.hexdigest()[:12]


def read(path: Path) -> list[dict]:
    """The runs in a file, none if there is no file."""
    if not path.exists():
        return []
    return json.loads(path.read_text(encoding="utf-8"))["runs"]


class Results:
    """The results of one card, torch and source in a file, which is written after each piece. Other
    runs in it stay."""

    def __init__(self, path: Path, card: str, torch: str, retry: bool = False):
        self.path = path
        self.final = ("done",) if retry else ("done", "failed")
        self.lock = threading.Lock()
        self.runs = read(path)
        wanted = {"card": card, "torch": torch, "source": source()}
        same = [run for run in self.runs if all(run[key] == wanted[key] for key in wanted)]
        self.run = same[0] if same else {**wanted, "pieces": {}}
        self.runs = [*(run for run in self.runs if run is not self.run), self.run]

    def has(self, name: str) -> bool:
        """Whether a piece has been measured or, unless `retry`, has failed. Others are tried
        again."""
        return self.run["pieces"].get(name, {}).get("status") in self.final

    def note(self, name: str, entry: dict) -> None:
        with self.lock:
            self.run["pieces"][name] = entry
            write_text(self.path, json.dumps({"runs": self.runs}, indent=1) + "\n", durable=True)
