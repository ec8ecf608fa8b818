# For the run_*.sh wrappers, which source it: finds or makes the Python environment, sets the allocator, picks a tier.
# shellcheck shell=bash
ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

fail() { printf 'error: %s\n' "$1" >&2; exit "${2:-1}"; }

# Read before CUDA starts, under the old and the new name (common/device.py says why both). What is set already stays.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-${PYTORCH_ALLOC_CONF-expandable_segments:True}}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-$PYTORCH_CUDA_ALLOC_CONF}
# How long a waiting CPU thread spins before it sleeps. By the default a training step on two cores took 3 s instead of
# 0.4 s as soon as another process wanted one of them; this costs a tenth where none does.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT-1000}

# is_supported PYTHON: whether it runs and has wheels of torch 2.8 to 2.11.
is_supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; }

# requirement_status PYTHON FILE...: prints "all" where an interpreter has everything the files ask for, "torch" where it
# has at least torch and torchaudio and a venv can stand on it, "none" otherwise (also where it does not run).
requirement_status() {
  local python=$1; shift
  "$python" - "$@" 2>/dev/null <<'PY' || echo none
import re, sys
if sys.version_info < (3, 10):
    sys.exit(1)
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
# A venv on top of a venv would see the first one's Python, not its packages.
base = same and sys.prefix == sys.base_prefix
print("all" if same and all(map(met, lines)) else "torch" if base else "none")
PY
}

# ensure_python FILE...: sets PYTHON to an interpreter that meets the requirement files: the active one if it does, else
# ROOT/.venv, made on first use. Nothing is installed anywhere else, conda's base included.
ensure_python() {
  local files=() file active status base='' options=() candidate found pip arguments=()
  for file in "$@"; do files+=("$ROOT/$file"); done
  PYTHON=$ROOT/.venv/bin/python
  active=$(command -v python3 || command -v python || true)
  status=$(requirement_status "$active" "${files[@]}")
  if [ "$status" = all ]; then PYTHON=$active; return; fi
  if [ "$(requirement_status "$PYTHON" "${files[@]}")" = all ]; then return; fi
  { : >"$ROOT/.venv.lock"; } 2>/dev/null || fail "the packages of $* are missing and $ROOT cannot be written to: activate an environment that has them"
  exec 9>"$ROOT/.venv.lock"
  if command -v flock >/dev/null && ! flock -n 9; then
    echo "another run is making $ROOT/.venv: waiting for it" >&2
    flock 9 || true # a file system without locks
  fi
  if [ "$(requirement_status "$PYTHON" "${files[@]}")" = all ]; then exec 9>&-; return; fi
  # A broken or half-made .venv is made anew; one whose prefix is the base's would have pip install into the base.
  if ! "$PYTHON" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null; then
    # Colab and conda bring torch: a .venv on top of it needs only what is missing.
    if [ "$status" = torch ]; then base=$active; options=(--system-site-packages); fi
    for candidate in "$active" python3.12 python3.11 python3.13 python3.10 python3 python; do
      [ -n "$base" ] || ! is_supported "$candidate" || base=$candidate
    done
    if [ -z "$base" ]; then
      found="none was found"
      [ -z "$active" ] || found="$active is $("$active" -V 2>&1 | head -n 1)"
      fail "Python 3.10 to 3.14 is needed and $found: install one (Debian, Ubuntu: sudo apt install python3 python3-venv)"
    fi
    echo "making $ROOT/.venv with $("$base" -V 2>&1)" >&2
    if ! { rm -rf "$ROOT/.venv" && "$base" -m venv --without-pip ${options[@]+"${options[@]}"} "$ROOT/.venv"; }; then
      fail "cannot make $ROOT/.venv (the reason is above; where the venv module is missing: sudo apt install python3-venv)"
    fi
  fi
  is_supported "$PYTHON" || fail "$ROOT/.venv has $("$PYTHON" -V 2>&1), and Python 3.10 to 3.14 is needed: remove that folder and run this again"
  # Debian's Python has no ensurepip without python3-venv; its own pip, or Colab's, installs into the .venv as well. (A
  # folder named pip, where the user is, can be imported but not run.)
  pip=("$PYTHON" -m pip)
  if ! { "$PYTHON" -c 'import pip.__main__' || "$PYTHON" -m ensurepip --default-pip; } >/dev/null 2>&1; then
    pip=("${base:-$active}" -m pip --python "$PYTHON")
    "${base:-$active}" -c 'import pip.__main__' 2>/dev/null || fail "${base:-$active} has no pip: sudo apt install python3-venv (Debian, Ubuntu), or activate an environment that has requirements.txt"
  fi
  for file in "${files[@]}"; do arguments+=(-r "$file"); done
  echo "installing $* into $ROOT/.venv (torch with CUDA is about 5 GB; once, a few minutes)" >&2
  "${pip[@]}" install --quiet --disable-pip-version-check "${arguments[@]}" >&2 ||
    fail "pip could not install $* into $ROOT/.venv (its message is above): check the network and the disk, then run this again"
  [ "$(requirement_status "$PYTHON" "${files[@]}")" = all ] ||
    fail "$ROOT/.venv still lacks something of $*: remove $ROOT/.venv and run this again"
  exec 9>&-
}

# pick_tier NAME:MIB...: the first row, rows sorted from large to small, whose memory the first visible GPU has; cpu
# without a GPU. nvidia-smi reports a T4 as 15,109 to 15,360 MiB and an RTX 4080 as 16,376. Where it cannot tell (a MIG
# slice, memory shared with the CPU) it is the last row.
pick_tier() {
  local row memory='' first=${CUDA_VISIBLE_DEVICES-0} query=(nvidia-smi '--query-gpu=memory.total' '--format=csv,noheader,nounits')
  first=${first%%,*}
  case "$first" in
    MIG-*) "${query[@]}" >/dev/null 2>&1 && memory='[slice]' ;; # nvidia-smi finds no slice by its name
    ?*) memory=$("${query[@]}" -i "$first" 2>/dev/null) || memory='' ;;
  esac
  case "$memory" in [0-9]* | '['*) ;; *) echo cpu; return ;; esac
  for row in "$@"; do
    if [ "$memory" -ge "${row#*:}" ] 2>/dev/null; then break; fi
  done
  echo "${row%%:*}"
}

# given FLAG ARGUMENT...: whether a flag (or FLAG=value) is among the arguments.
given() {
  local flag=$1 argument; shift
  for argument in "$@"; do
    case "$argument" in "$flag" | "$flag"=*) return 0 ;; esac
  done
  return 1
}

# memory_options ARGUMENT...: sets recompute, frozen, bits and host, what makes a Whisper fit, for the rows of its wrappers.
# A parameter takes 4 bytes as a weight, 4 as its gradient, and 8 in AdamW's averages, 2 where they have 8 bits, none where
# they are on the host; of a frozen encoder there are weights only.
memory_options() {
  recompute=--gradient_checkpointing frozen=--freeze_encoder bits='--optimizer adamw_8bit' host=--use_cpu_offload
  if given --use_cpu_offload "$@"; then bits=''; fi # the two exclude each other, and the user's wins
  if given --optimizer "$@"; then host=''; fi
}

# refuse_frozen TIER ROW MODEL FIT ARGUMENT...: ends where the row FIT freezes the encoder and there is no MODEL to start from.
refuse_frozen() {
  local tier=$1 row=$2 model=$3 fit=$4; shift 4
  case " $fit " in *" --freeze_encoder "*) ;; *) return 0 ;; esac
  if [ -z "$model" ] && ! given --resume "$@"; then
    fail "$row fits in tier $tier with a frozen encoder only, and from scratch there is nothing to freeze: add --model_dir or --model_file, or take a smaller size" 2
  fi
}

# help_if_asked ARGUMENT...: with --help among the arguments, shows the comment at the wrapper's top and ends. The recipe's
# own --help would need the 5 GB installed first.
help_if_asked() {
  if given --help "$@" || given -h "$@"; then sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit; fi
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
  set -- "$recipe" "${preset[@]}" ${arguments[@]+"${arguments[@]}"}
  if [ -n "$print" ]; then
    printf 'python'; printf ' %q' "$@"; printf '\n'
    return
  fi
  ensure_python requirements.txt
  exec "$PYTHON" "$@"
}
