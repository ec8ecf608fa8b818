#!/bin/sh
# shellcheck shell=bash
# The tests, in under ten minutes on two cores: ./run_tests.sh [pytest arguments]; the slow ones: ./run_tests.sh -m slow
[ -n "${BASH_VERSION:-}" ] || exec /bin/bash -p -- "$0" "$@" # not by PATH, without BASH_ENV: see common/env.sh
set -euo pipefail
script=$(PATH=/usr/bin:/bin:$PATH readlink -f -- "${BASH_SOURCE[0]}")
. "${script%/*}/common/env.sh"
ensure_python requirements.txt requirements-dev.txt
cd "$ROOT"
unset PYTHONSAFEPATH # tests run python -c in this folder
"$PYTHON" -c "$MODULE" ruff check --quiet .
"$PYTHON" -c "$MODULE" ruff format --check --quiet .
marker=(-m 'not slow')
given -m "$@" && marker=()
exec "$PYTHON" -c "$MODULE" pytest ${marker[@]+"${marker[@]}"} "$@"
