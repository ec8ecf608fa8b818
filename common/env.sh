# Sourced by the run_*.sh scripts: finds or makes the Python environment, and starts common/preset.py
# in it, which picks a row of the script's table and starts the recipe.
# shellcheck shell=bash
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
trap 'exit 130' INT # Ctrl-C ends the script together with an installation

say() { echo "$1" >&2; }

fail() {
  say "error: $1"
  exit 1
}

# help_if_asked WORD...: prints the comment at the head of the script and ends it, if one of the words
# asks for that: the program's own --help would need the packages, 5 GB, first.
help_if_asked() {
  local word
  for word; do
    if [[ $word = --help || $word = -h ]]; then
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
      exit
    fi
  done
}

# --- the Python environment ---

OTHERS=(python3.12 python3.11 python3.13 python3.10) # where the active one is too old

# is_supported PYTHON: whether this interpreter runs, and torch has wheels for its version.
is_supported() { "$1" -c 'import sys; assert (3, 10) <= sys.version_info < (3, 15)' 2>/dev/null; }

# find_base PYTHON...: sets `base` to the first of these interpreters that is supported.
find_base() {
  for base; do
    if is_supported "$base"; then return; fi
  done
  fail "Python 3.10 to 3.14 is needed and ${active:-none} was found: sudo apt install python3 python3-venv"
}

# meets PYTHON REQUIREMENTS: whether this interpreter has these packages, one a line as in
# requirements.txt.
meets() {
  "$1" -c '
import re, sys
from importlib import metadata

def numbers(version):
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])

for line in sys.argv[1].splitlines():
    if line and not line.startswith("#"):
        name, bounds = re.match(r"([\w.-]+)(.*)", line).groups()
        version = numbers(metadata.version(name))
        for sign, bound in re.findall(r"(>=|<)([\d.]+)", bounds):
            assert (version >= numbers(bound)) == (sign == ">=")
' "$2" 2>/dev/null
}

# find_python FILE...: sets PYTHON to an interpreter that meets these requirement files: the active
# one if it does, else that of .venv. Fails if neither does.
find_python() {
  lock=$ROOT/.venv.lock
  needed=$(cd "$ROOT" && cat "$@")
  active=$(type -P python3 || type -P python || true)
  PYTHON=$active
  if meets "$PYTHON" "$needed"; then return; fi
  PYTHON=$ROOT/.venv/bin/python
  [ ! -s "$lock" ] && meets "$PYTHON" "$needed"
}

# ensure_python FILE...: the same; .venv is made on first use. Nothing is installed anywhere else.
ensure_python() {
  local needed active lock
  if find_python "$@"; then return; fi
  { true >>"$lock"; } 2>/dev/null ||
    fail "$* is not installed and $ROOT cannot be written to: activate an environment that has it"
  install "$@" 9>>"$lock"
}

# Where torch's CPU build is. An empty TORCH_INDEX takes the build of pip's own index.
TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}

# install_cpu_torch PIP...: installs torch's CPU build where it is wanted: on Linux, without an NVIDIA
# driver. If its index cannot be reached, pip's own serves.
install_cpu_torch() {
  local torch
  torch=$(grep ^torch <<<"$needed")
  if [[ -z $TORCH_INDEX || $OSTYPE != linux* || -e /proc/driver/nvidia || -e /dev/nvidia0 ]] ||
    type -P nvidia-smi >/dev/null || meets "$PYTHON" "$torch"; then
    return
  fi
  say "no NVIDIA driver: torch's CPU build is installed, 0.2 GB (TORCH_INDEX= for the one with CUDA)"
  if ! "$PYTHON" -c '
import sys, urllib.request
urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=5)' "$TORCH_INDEX" 2>/dev/null ||
    ! "$@" install --quiet --disable-pip-version-check --index-url "$TORCH_INDEX" \
      -r /dev/stdin <<<"$torch" >&2; then
    say "$TORCH_INDEX cannot be used: torch comes from pip's own index"
  fi
}

# install FILE...: makes .venv if it is missing and installs the packages, for ensure_python. Of two
# runs at once one waits for the lock, file descriptor 9. Its file has text until a new .venv is
# complete, so that an interrupted installation is repeated.
install() {
  local base=$active options=(--without-pip) pip
  if type -P flock >/dev/null && ! flock -n 9; then
    say "another run is making $ROOT/.venv: waiting for it"
    flock 9 || true # a file system without locks
  fi
  if [ ! -s "$lock" ] && meets "$PYTHON" "$needed"; then return; fi

  if [ -s "$lock" ] || ! "$PYTHON" -c '' 2>/dev/null; then
    find_base "$active" "${OTHERS[@]}"
    # Colab and conda bring torch: a .venv on top of them only needs the missing packages. A venv
    # cannot be such a base, because one that is made from it does not see its packages.
    if "$base" -c 'import sys; assert sys.prefix == sys.base_prefix' 2>/dev/null &&
      meets "$base" "$(grep ^torch <<<"$needed")"; then
      options+=(--system-site-packages)
    fi
    say "making $ROOT/.venv with $("$base" -V 2>&1)"
    echo unfinished >&9
    rm -rf "$ROOT/.venv"
    "$base" -m venv "${options[@]}" "$ROOT/.venv" ||
      fail "cannot make $ROOT/.venv (the reason is above; without venv: sudo apt install python3-venv)"
  fi

  # Debian's Python has no ensurepip without python3-venv, but its own pip can install into .venv.
  pip=("$PYTHON" -m pip)
  if ! { "${pip[@]}" --version || "$PYTHON" -m ensurepip; } >/dev/null 2>&1; then
    pip=("$base" -m pip --python "$PYTHON")
  fi
  say "installing $* into $ROOT/.venv (torch with CUDA is about 5 GB; once, a few minutes)"
  install_cpu_torch "${pip[@]}"
  "${pip[@]}" install --quiet --disable-pip-version-check -r /dev/stdin <<<"$needed" >&2 ||
    fail "pip could not install $* into $ROOT/.venv (the reason is above): check the network and the disk, then run this again; without pip: sudo apt install python3-venv"
  true >"$lock"
}

# --- the start ---

# What a script may set, as `Script` in preset.py describes it.
rows='' adds='' usual='' brings='' light='' always=''

# run RECIPE WORD...: runs a recipe with the preset for a user's words, and does not return.
run() {
  local base recipe=$1 python=''
  shift
  help_if_asked "$@"
  if find_python requirements.txt; then
    python=$PYTHON
    base=$PYTHON
  else
    find_base "$active" "$PYTHON" "${OTHERS[@]}"
  fi
  exec "$base" -I "$ROOT/common/preset.py" recipe="$recipe" rows="$rows" adds="$adds" \
    usual="$usual" brings="$brings" light="$light" always="$always" python="$python" -- "$@"
}

# bash common/env.sh ensure_python FILE...: prints the interpreter, for preset.py.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -eo pipefail
  "$@"
  echo "$PYTHON"
fi
