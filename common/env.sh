# For the run_*.sh wrappers, which source it: finds or makes the Python environment, sets the allocator, picks a tier.
# shellcheck shell=bash
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { printf 'error: %s\n' "$1" >&2; exit "${2:-1}"; }

# Read before CUDA starts, under the name of torch <= 2.8 and of later versions. What is set already stays.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-${PYTORCH_ALLOC_CONF-expandable_segments:True}}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-$PYTORCH_CUDA_ALLOC_CONF}

# requirement_status PYTHON FILE...: prints "all" where an interpreter has everything the files ask for, "torch" where it
# has at least torch and torchaudio, "old" where it is older than 3.10, "none" otherwise (also where it does not run).
requirement_status() {
  local python=$1; shift
  "$python" - "$@" 2>/dev/null <<'PY' || echo none
import re, sys
if sys.version_info < (3, 10):
    print("old")
    sys.exit()
from importlib import metadata
def numbers(version):
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])
def met(line):
    name, bounds = re.match(r"([\w.-]+)(.*)", line).groups()
    try:
        have = numbers(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", bounds):
        if (have < numbers(bound)) if sign == ">=" else (have >= numbers(bound)):
            return False
    return True
lines = [line.strip() for path in sys.argv[1:] for line in open(path) if line.strip() and line[0] != "#"]
torch = [line for line in lines if line.startswith("torch")]
same = all(map(met, torch)) and len({numbers(metadata.version(n))[:2] for n in ("torch", "torchaudio")}) == 1
print("all" if same and all(map(met, lines)) else "torch" if same else "none")
PY
}

# ensure_python FILE...: sets PYTHON to an interpreter that meets the requirement files: the active one if it does, else
# ROOT/.venv, made on first use. Nothing is installed anywhere else, conda's base included.
ensure_python() {
  local files=() file candidate base='' status options=() active
  for file in "$@"; do files+=("$ROOT/$file"); done
  active=$(command -v python3 || command -v python || true)
  if [ -n "$active" ]; then
    status=$(requirement_status "$active" "${files[@]}")
    if [ "$status" = all ]; then PYTHON=$active; return; fi
    # Colab and conda bring torch: a .venv on top of it needs only what is missing. (A venv cannot stand on a venv.)
    if [ "$status" = torch ] && [ -z "${VIRTUAL_ENV:-}" ]; then base=$active; options=(--system-site-packages); fi
  fi
  PYTHON=$ROOT/.venv/bin/python
  if [ -x "$PYTHON" ] && [ "$(requirement_status "$PYTHON" "${files[@]}")" = all ]; then return; fi
  if command -v flock >/dev/null && { : >"$ROOT/.venv.lock"; } 2>/dev/null; then
    exec 9>"$ROOT/.venv.lock"
    flock 9 # a second wrapper waits for the first one's installation
  fi
  if ! { [ -x "$PYTHON" ] && "$PYTHON" -c '' 2>/dev/null; }; then
    for candidate in "$active" python3.12 python3.11 python3.13 python3.10 python3 python; do
      [ -n "$base" ] && break
      [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null && base=$candidate
    done
    if [ -z "$base" ]; then
      [ -n "$active" ] || fail "no Python was found: install Python 3.10 to 3.14 (Debian, Ubuntu: sudo apt install python3 python3-venv)"
      fail "Python 3.10 to 3.14 is needed, and $active is $("$active" -V 2>&1): install a newer one (Debian, Ubuntu: sudo apt install python3 python3-venv)"
    fi
    echo "making $ROOT/.venv with $("$base" -V 2>&1)"
    rm -rf "$ROOT/.venv"
    if "$base" -c 'import venv, ensurepip' 2>/dev/null; then
      "$base" -m venv "${options[@]}" "$ROOT/.venv" || fail "cannot make $ROOT/.venv (is the folder writable, the disk full?)"
    elif "$base" -c 'import venv, pip' 2>/dev/null; then
      "$base" -m venv --without-pip "${options[@]}" "$ROOT/.venv" || fail "cannot make $ROOT/.venv (is the folder writable, the disk full?)"
    else
      fail "this Python ($base) has no venv module: sudo apt install python3-venv (Debian, Ubuntu), or activate an environment of your own that has requirements.txt"
    fi
  fi
  local pip=("$PYTHON" -m pip) arguments=()
  "$PYTHON" -c 'import pip' 2>/dev/null || pip=("${base:-$active}" -m pip --python "$PYTHON")
  for file in "${files[@]}"; do arguments+=(-r "$file"); done
  echo "installing $* into $ROOT/.venv (torch with CUDA is about 5 GB; once, a few minutes)"
  "${pip[@]}" install --quiet --disable-pip-version-check "${arguments[@]}" >&2 ||
    fail "pip could not install $* into $ROOT/.venv (its message is above): check the network and the disk, then run this again"
  [ "$(requirement_status "$PYTHON" "${files[@]}")" = all ] ||
    fail "$ROOT/.venv still lacks something of $*: remove $ROOT/.venv and run this again"
  { exec 9>&-; } 2>/dev/null || true
}

# pick_tier NAME:MIB...: the first row, rows sorted from large to small, whose memory the first visible GPU has; cpu
# without a GPU. nvidia-smi reports a T4 as 15,109 to 15,360 MiB and an RTX 4080 as 16,376.
pick_tier() {
  local memory row first=${CUDA_VISIBLE_DEVICES-0}
  first=${first%%,*}
  memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits ${first:+-i "$first"} 2>/dev/null | head -n 1)
  if [ -z "$first" ] || ! [ "${memory:-x}" -gt 0 ] 2>/dev/null; then echo cpu; return; fi
  for row in "$@"; do
    if [ "$memory" -ge "${row#*:}" ]; then echo "${row%%:*}"; return; fi
  done
}

# given FLAG ARGUMENT...: whether a flag (or FLAG=value) is among the arguments.
given() {
  local flag=$1 argument; shift
  for argument in "$@"; do
    case "$argument" in "$flag" | "$flag"=*) return 0 ;; esac
  done
  return 1
}

# run RECIPE PRESET... -- ARGUMENT...: runs a recipe with a preset's flags, then the user's, which win; with --print among
# the user's it shows the command instead.
run() {
  local recipe=$1 preset=() arguments=() argument print=''; shift
  while [ "$1" != -- ]; do preset+=("$1"); shift; done
  shift
  for argument in "$@"; do
    if [ "$argument" = --print ]; then print=yes; else arguments+=("$argument"); fi
  done
  if [ -n "$print" ]; then
    printf 'python %s\n' "$(printf '%q ' "$recipe" "${preset[@]}" ${arguments[@]+"${arguments[@]}"})"
    return
  fi
  ensure_python requirements.txt
  exec "$PYTHON" "$recipe" "${preset[@]}" ${arguments[@]+"${arguments[@]}"}
}
