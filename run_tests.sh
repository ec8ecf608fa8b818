#!/usr/bin/env bash
# The tests, in under ten minutes on two cores: ./run_tests.sh [pytest arguments]; the slow ones: ./run_tests.sh -m slow
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_tests.sh
set -euo pipefail
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common/env.sh"
ensure_python requirements.txt requirements-dev.txt
cd "$ROOT"
"$PYTHON" -m ruff check --quiet .
"$PYTHON" -m ruff format --check --quiet .
marker=(-m 'not slow')
given -m "$@" && marker=()
exec "$PYTHON" -m pytest ${marker[@]+"${marker[@]}"} "$@"
