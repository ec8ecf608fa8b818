"""The training core. It trains anything and knows no speech."""

import os
import signal
import sys
from pathlib import Path

if sys.platform == "win32":
    sys.exit("error: this project needs Linux or macOS; on Windows, run it in WSL2 (wsl --install)")


def _leave(number: int, frame) -> None:
    os.write(2, f"stopped by {signal.Signals(number).name} before it began\n".encode())
    os._exit(128 + number)


# A recipe imports this package first. The libraries then take seconds, in which a signal would be a
# traceback.
if (
    Path(getattr(sys.modules["__main__"], "__file__", None) or ".").resolve().parent.name
    == "recipes"
):
    signal.signal(signal.SIGINT, _leave)
    for descriptor in (0, 1, 2):  # a closed one would be given to the next file that is opened
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
