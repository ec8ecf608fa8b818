#!/usr/bin/env bash
# The tests: ./run_tests.sh [pytest arguments]
# The slow ones: ./run_tests.sh -m slow
# Those of the page in a browser: ./run_tests.sh -m browser
set -eo pipefail
# shellcheck source=common/env.sh
. "$(dirname "$0")/common/env.sh"
ensure_python requirements.txt requirements-webui.txt requirements-dev.txt
cd "$ROOT"
"$PYTHON" -m ruff check --quiet .
"$PYTHON" -m ruff format --check --quiet .
exec "$PYTHON" -m pytest -m 'not slow and not browser' "$@" # of two -m the last one counts
