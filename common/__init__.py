"""The training core. It trains anything and knows no speech."""

import importlib.util
import os
import sys
from pathlib import Path

if sys.platform == "win32":
    sys.exit("error: this project needs Linux or macOS; on Windows, run it in WSL2 (wsl --install)")


def require_packages(*names: str) -> None:
    """Ends the program if its Python lacks one of these packages, as it does outside of .venv."""
    missing = [
        name for name in names if name not in sys.modules and not importlib.util.find_spec(name)
    ]
    if missing:
        root = Path(__file__).resolve().parents[1]
        how = f"source {root}/.venv/bin/activate"
        if not (root / ".venv").exists() or sys.prefix == f"{root}/.venv":
            how = f"bash {root}/common/env.sh ensure_python requirements.txt; {how}"
        sys.exit(f"error: {sys.executable} has no package {missing[0]}: first type: {how}")


require_packages("torch", "numpy", "soundfile", "safetensors", "tokenizers")


def spin_briefly() -> None:
    """Makes a waiting CPU thread of torch's sleep soon, unless the user has said how long it spins.
    Call it before torch is imported, which reads the variable once. With the default, a training on
    two cores takes several times as long as soon as another process needs one of them."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
