"""The training core. It trains anything and knows no speech."""

import sys

if sys.platform == "win32":
    sys.exit("error: this project needs Linux or macOS; on Windows, run it in WSL2 (wsl --install)")
