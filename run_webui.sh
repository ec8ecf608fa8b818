#!/usr/bin/env bash
# A page in the browser: check data, train, listen, read, export, without typing commands. It makes
# the Python environment on first use, prints the page's address with its token, and opens nothing.
#   ./run_webui.sh [--port 7860] [--data DIR] [--runs DIR] [--host ADDRESS]
# --data: what the page may read (default: data, made if it is missing).
# --runs: where uploads and runs are kept (default: runs). Trainings continue when the page ends.
# --host: address to listen on; other machines can reach the page if it is not 127.0.0.1, and need
# the token, too.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_webui.sh
set -eo pipefail
# shellcheck source=common/env.sh
. "$(dirname "$0")/common/env.sh"
help_if_asked "$@"
ensure_python requirements.txt requirements-webui.txt
exec "$PYTHON" "$ROOT/webui/app.py" "$@"
