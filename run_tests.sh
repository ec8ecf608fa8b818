#!/usr/bin/env bash
# The tests, in eight minutes on two cores: ./run_tests.sh [pytest arguments]
# The slow ones: ./run_tests.sh -m slow
# Those of the page in a browser: ./run_tests.sh -m browser
set -eo pipefail
# shellcheck source=common/env.sh
. "$(dirname "$0")/common/env.sh"
ensure_python requirements.txt requirements-webui.txt requirements-dev.txt
cd "$ROOT"
"$PYTHON" -m ruff check --quiet .
"$PYTHON" -m ruff format --check --quiet .
# Two processes with a thread each are faster than one with two threads. Of two -m or -n the last counts.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m pytest -n 2 --dist loadfile -m 'not slow and not browser' "$@"
