# Sourced by the run_*.sh scripts: finds or makes the Python environment, sets the allocator, picks a tier and a row of the
# script's table, and starts the recipe.
# shellcheck shell=bash disable=SC2034,SC2046,SC2086,SC2154,SC2206
ROOT=$(CDPATH='' cd -- "${BASH_SOURCE[0]%/*}/.." && printf '%s/' "$PWD") # without the slash a last newline would be lost
ROOT=${ROOT%/}

# Nothing in the current folder may run. Relative and empty entries of these variables stand for it, so they are dropped.
for name in PATH PYTHONPATH PYTHONHOME PYTHONUSERBASE PYTHONPYCACHEPREFIX PYTHONINSPECT HOME LD_LIBRARY_PATH BASH_ENV; do
  rest=${!name-}: kept=''
  while [ -n "$rest" ]; do case "$rest" in /*) kept+=:${rest%%:*} ;; esac; rest=${rest#*:}; done
  if [ -n "$kept" ]; then export "$name=${kept#:}"; else unset "$name"; fi
done
# Python puts it on the path of -c, -m and - as well: from 3.11 on unless this variable is set, in 3.10 until SAFELY ran.
export PATH=${PATH-/usr/local/bin:/usr/bin:/bin} PYTHONSAFEPATH=1
SAFELY=$'import sys; sys.path[:] = filter(None, sys.path)\n'
MODULE="${SAFELY}import runpy; sys.argv.pop(0); runpy.run_module(sys.argv[0], None, '__main__', True)" # as -m does

# The number of a closed stream would be given to the next file that is opened.
for name in 0 2; do [ -e "/dev/fd/$name" ] || eval "exec $name<>/dev/null"; done
say() { printf '%s\n' "$1" >&2 || true; }
fail() { say "error: $1"; exit "${2:-1}"; }
# answer TEXT: ends the script with this output.
answer() { printf '%s\n' "$1" 2>/dev/null || fail "nothing was printed: standard output is closed or full"; exit; }

# step COMMAND...: runs a slow command. A signal ends both at once; without `wait`, bash would first wait for the command.
step() { "$@" <&0 & wait "$!"; }
stop() { { kill $(jobs -pr) || true; wait; } 2>/dev/null; exit "$1"; }
trap 'stop 129' HUP; trap 'stop 130' INT; trap 'stop 143' TERM

# CUDA reads these when it starts, under the old or the new name (see common/device.py). A user's values stay.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-${PYTORCH_ALLOC_CONF-expandable_segments:True}}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-$PYTORCH_CUDA_ALLOC_CONF}
# How long a waiting CPU thread spins before it sleeps. With the default, a training step on two cores took 3 s instead of
# 0.4 s as soon as another process needed one of them. On idle cores this setting costs a tenth.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT-1000}

# is_supported PYTHON: whether this interpreter runs, and torch 2.8 to 2.11 has wheels for it.
is_supported() { "$1" -c "${SAFELY}sys.exit(not (3, 10) <= sys.version_info < (3, 15))" 2>/dev/null; }

# requirement_status PYTHON FILE...: prints "all" if an interpreter meets the requirement files, "torch" if it has torch and
# torchaudio and can be the base of a venv (a venv cannot: one made from it lacks its packages), otherwise "none".
requirement_status() {
  local python=$1; shift
  "$python" -c "$SAFELY"'
sys.version_info < (3, 10) and sys.exit(1)
import re
from importlib import metadata
def numbers(version):
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])
def met(line):
    name, bounds = re.match(r"([\w.-]+)(.*)", line).groups()
    try:
        have = numbers(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
    return all((have >= numbers(bound)) == (sign == ">=") for sign, bound in re.findall(r"(>=|<)([\d.]+)", bounds))
lines = [line.strip() for path in sys.argv[1:] for line in open(path) if line.strip() and line[0] != "#"]
torch = [line for line in lines if line.startswith("torch")]
same = all(map(met, torch)) and len({numbers(metadata.version(n))[:2] for n in ("torch", "torchaudio")}) == 1
print("all" if same and all(map(met, lines)) else "torch" if same and sys.prefix == sys.base_prefix else "none")
' "$@" 2>/dev/null || echo none
}

# is_complete FILE...: whether ROOT/.venv meets the requirement files. The lock file has text until a new .venv is complete.
is_complete() { [ ! -s "$ROOT/.venv.lock" ] && [ "$(requirement_status "$PYTHON" "$@")" = all ]; }
# ensure_pip: runs in a folder without modules, because ensurepip itself runs python -c.
ensure_pip() { cd "$ROOT/.venv" && exec "$PYTHON" -c "$MODULE" ensurepip --default-pip; }

# ensure_python FILE...: sets PYTHON to an interpreter that meets the requirement files: the active one if it does, else
# that of ROOT/.venv, which is made on first use. Nothing is installed anywhere else, conda's base included.
ensure_python() {
  local files=() file active status base='' options=() candidate found='' pip arguments=() lock=$ROOT/.venv.lock
  for file in "$@"; do files+=("$ROOT/$file") arguments+=(-r "$ROOT/$file"); done
  PYTHON=$ROOT/.venv/bin/python
  active=$(type -P python3 || type -P python || true)
  status=$(requirement_status "$active" "${files[@]}")
  if [ "$status" = all ]; then PYTHON=$active; return; fi
  if is_complete "${files[@]}"; then return; fi
  { true >>"$lock"; } 2>/dev/null || fail "the packages of $* are missing and $ROOT cannot be written to: activate an environment that has them"
  exec 9>>"$lock"
  if type -P flock >/dev/null && ! flock -n 9; then
    say "another run is making $ROOT/.venv: waiting for it"
    step flock 9 || true # a file system without locks
  fi
  if is_complete "${files[@]}"; then exec 9>&-; return; fi
  # A broken or half-made .venv is made again. If its prefix were the base's, pip would install into the base.
  if [ -s "$lock" ] || ! "$PYTHON" -c "${SAFELY}sys.exit(sys.prefix == sys.base_prefix)" 2>/dev/null; then
    # Colab and conda bring torch: a .venv on top of them only needs the missing packages.
    if [ "$status" = torch ]; then base=$active; options=(--system-site-packages); fi
    for candidate in "$active" python3.12 python3.11 python3.13 python3.10 python3 python; do
      [ -n "$base" ] || ! is_supported "$candidate" || base=$candidate
    done
    if [ -z "$base" ]; then
      [ -z "$active" ] || found="$active is $("$active" -V 2>&1 | head -n 1)"
      fail "Python 3.10 to 3.14 is needed and ${found:-none was found}: install one (Debian, Ubuntu: sudo apt install python3 python3-venv)"
    fi
    say "making $ROOT/.venv with $("$base" -V 2>&1)"
    echo unfinished >&9
    if ! { step rm -rf "$ROOT/.venv" && step "$base" -c "$MODULE" venv --without-pip ${options[@]+"${options[@]}"} "$ROOT/.venv"; }; then
      fail "cannot make $ROOT/.venv (the reason is above; where the venv module is missing: sudo apt install python3-venv)"
    fi
  fi
  is_supported "$PYTHON" || fail "$ROOT/.venv has $("$PYTHON" -V 2>&1), and Python 3.10 to 3.14 is needed: remove that folder and run this again"
  # Debian's Python has no ensurepip without python3-venv, but its own pip, or Colab's, can install into the .venv.
  pip=("$PYTHON" -c "$MODULE" pip)
  if ! { "$PYTHON" -c "${SAFELY}import pip.__main__" || step ensure_pip; } >/dev/null 2>&1; then
    pip=("${base:-$active}" -c "$MODULE" pip --python "$PYTHON")
    "${base:-$active}" -c "${SAFELY}import pip.__main__" 2>/dev/null ||
      fail "${base:-$active} has no pip: sudo apt install python3-venv (Debian, Ubuntu), or activate an environment that has requirements.txt"
  fi
  say "installing $* into $ROOT/.venv (torch with CUDA is about 5 GB; once, a few minutes)"
  status=0; step "${pip[@]}" install --quiet --disable-pip-version-check "${arguments[@]}" >&2 || status=$?
  [ "$status" -gt 128 ] || true >"$lock" # no signal ended pip
  [ "$status" = 0 ] || fail "pip could not install $* into $ROOT/.venv (its message is above): check the network and the disk, then run this again"
  is_complete "${files[@]}" || fail "$ROOT/.venv still lacks something of $*: remove $ROOT/.venv and run this again"
  exec 9>&-
}

# given FLAGS ARGUMENT...: whether one of FLAGS, a text of flags, is among the arguments, as FLAG or FLAG=value.
given() {
  local flags=" $1 " argument; shift
  for argument in "$@"; do case "$flags" in *" ${argument%%=*} "*) return 0 ;; esac; done
  return 1
}

# trains ARGUMENT...: fails if the recipe only uses a model or writes a data set, for which it needs no row of the table.
trains() { ! given '--transcribe --evaluate --write_dataset --synthesize' "$@" && ! only_exports "$@"; }

# only_exports ARGUMENT...: whether the recipe exports the weights of --resume or of a released model and does not train.
only_exports() {
  if ! given --export "$@" || ! given '--resume --model_dir --model_file' "$@"; then return 1; fi
  case " $* " in *' --resume auto '* | *' --resume=auto '*) return 1 ;; esac
  ! given '--train_manifest --train_csv --data_dir --conditions --from_scratch --max_steps --num_epochs --dry_run --verify_gpu' "$@"
}

listed() { # WORD...: prints "a, b or c".
  local text=$1; shift
  while [ $# -gt 1 ]; do text+=", $1"; shift; done
  echo "$text${1:+ or $1}"
}

# The least MiB of each tier, for tier auto. nvidia-smi reports 15,109 to 15,360 for a T4 and 16,376 for an RTX 4080.
MEMORY='a100:70000 32gb:31000 24gb:22000 16gb:15900 12gb:11500 t4:11000 8gb:7000 6gb:5600 4gb:0'

# pick_tier TIER...: prints the largest of these tiers for which the first visible GPU has the memory, or cpu without a GPU.
# It is the smallest if nvidia-smi cannot tell the memory (a MIG slice, memory shared with the CPU).
pick_tier() {
  local row tier='' memory='' first=${CUDA_VISIBLE_DEVICES-0}
  local query=(nvidia-smi '--query-gpu=memory.total' '--format=csv,noheader,nounits')
  first=${first%%,*}
  case "$first" in
    MIG-*) "${query[@]}" >/dev/null 2>&1 && memory='[slice]' ;; # nvidia-smi does not find a slice by its name
    ?*) memory=$("${query[@]}" -i "$first" 2>/dev/null) || memory='' ;;
  esac
  case "$memory" in [0-9]* | '['*) ;; *) echo cpu; return ;; esac
  for row in $MEMORY; do
    case " $* " in *" ${row%:*} "*) tier=${row%:*} ;; *) continue ;; esac
    if [ "$memory" -ge "${row#*:}" ] 2>/dev/null; then break; fi
  done
  echo "$tier"
}

# A preset script has a table, the text `rows`. The first row that matches TIER and SIZE counts; * matches any:
#   TIER SIZE BATCH ACCUMULATION [R] [F] [8] [H] [FLAG...]
#   TIER SIZE + FLAG...    adds flags to the rows below it
#   TIER SIZE ! SIZES      this size does not fit, SIZES do
# R is --gradient_checkpointing, F --freeze_encoder, 8 --optimizer adamw_8bit, H --use_cpu_offload.

# tier_and_size ARGUMENT...: reads TIER and SIZE in front of the flags. Sets tier, size (empty if not given), words (how many are
# given), gpus and flags, the preset's. Answers --rows and --help: the recipe's own --help would need the packages, 5 GB, first.
tier_and_size() {
  local row_tier row_size argument tiers=('*') sizes=('*') device=cpu
  if given '--help -h' "$@"; then answer "$(sed -n '3,/^[^#]/s/^# \{0,1\}//p' -- "$0")"; fi
  if [ "${1-}" = --rows ]; then answer "$rows"; fi
  while read -r row_tier row_size _; do
    case "$row_tier" in '' | '#'*) continue ;; esac
    case " ${tiers[*]} " in *" $row_tier "*) ;; *) tiers+=("$row_tier") ;; esac
    case " ${sizes[*]} " in *" $row_size "*) ;; *) sizes+=("$row_size") ;; esac
  done <<<"$rows"
  tier=auto size='' words=0 gpus=${GPUS:-1}
  if [ $# -gt 0 ] && [[ $1 != -* ]]; then tier=$1 words=1; fi
  if [ $# -gt 1 ] && [[ $1 != -* && $2 != -* ]]; then size=$2 words=2; fi
  if [ "$tier" = auto ]; then
    tier=$(pick_tier "${tiers[@]:1}") device=auto # nvidia-smi may be missing on a computer with a GPU; torch finds it
    for argument in $(given --dry_run "$@" && tr '[:upper:]' '[:lower:]' <<<"$*"); do case " ${tiers[*]:1} " in *" $argument "*) tier=$argument ;; esac; done
    say "tier: $tier (auto)"
  fi
  case " ${tiers[*]:1} " in
    *" $tier "*) ;;
    *) fail "no tier '$tier': it is $(listed auto "${tiers[@]:1}"); a size comes after it" 2 ;;
  esac
  case " ${sizes[*]:1} " in
    *" ${size:-${sizes[1]}} "*) ;;
    *) fail "no size '$size': it is $(listed "${sizes[@]:1}")" 2 ;;
  esac
  case "$gpus" in *[!0-9]* | 0* | ?????*) fail "GPUS=$gpus: it must be the number of GPUs to train on, such as 2" 2 ;; esac
  if [ "$gpus" -gt 1 ] && { ! trains "$@" || given '--verify_gpu --dry_run' "$@"; }; then
    say "GPUS=$gpus is ignored: this command runs in one process"
    gpus=1
  fi
  flags=(--mixed_precision)
  if [ "$tier" = cpu ]; then flags+=(--device "$device"); fi
}

# pick_row TIER SIZE ARGUMENT...: adds the row's flags to `flags`. On several GPUs each one takes its share of the row's
# update, in micro-batches that are as large as the row allows and divide the share.
pick_row() {
  local tier=$1 size=$2 row_tier row_size batch accumulation what more='' letter update share; shift 2
  while read -r row_tier row_size batch what; do
    case "$row_tier:$row_size" in "$tier:$size" | "$tier:*" | "*:$size" | "*:*") ;; *) continue ;; esac
    what=${what%%#*}
    case "$batch" in
      +) more+=" $what" ;;
      !) fail "$size does not fit in tier $tier: take $what" 2 ;;
      *) break ;;
    esac
  done <<<"$rows"
  [ -n "$batch" ] || fail "size $size has no row in tier $tier: take another size" 2
  accumulation=${what%% *} what=${what#"${what%% *}"}
  update=$((batch * accumulation)) share=$((batch * accumulation / gpus))
  if [ $((share * gpus)) = "$update" ]; then
    while ((share % batch)); do batch=$((batch - 1)); done
    accumulation=$((share / batch))
  elif ! given --batch_size "$@" || ! given --gradient_accumulation_steps "$@"; then
    fail "GPUS=$gpus does not divide an update of $update: take 2, 4 or 8, or give each GPU's --batch_size and --gradient_accumulation_steps" 2
  fi
  flags+=(--batch_size "$batch" --gradient_accumulation_steps "$accumulation")
  for letter in ${what%%--*}; do
    case "$letter" in
      R) flags+=(--gradient_checkpointing) ;;
      F) flags+=(--freeze_encoder)
         given '--model_dir --model_file --resume --dry_run' "$@" ||
           fail "$size fits in tier $tier only with a frozen encoder of a given model: add --model_dir or --model_file, or take a smaller size" 2 ;;
      8) given --use_cpu_offload "$@" || flags+=(--optimizer adamw_8bit) ;; # excludes H; the user's choice wins
      H) given --optimizer "$@" || flags+=(--use_cpu_offload) ;;
      *) fail "the row of tier $tier and size $size has an unknown letter, $letter" ;;
    esac
  done
  flags+=($more ${what#"${what%%--*}"})
}

# row_or_demo DEFAULT FLAGS ARGUMENT...: sets row, the size to take from the table: SIZE if it is given, else DEFAULT with one
# of FLAGS, which bring a model or data, else demo.
row_or_demo() {
  local default=$1 flags_of_others=$2; shift 2
  row=${size:-$default}
  if ! given "$flags_of_others" "$@"; then
    row=${size:-demo}
  elif [ "$row" = demo ]; then
    fail "size demo has its own model and data: with $(listed $flags_of_others) take $default or another size" 2
  fi
}

# is_new_model ROW ARGUMENT...: whether the row is the size of a model from scratch. The demo has its own size; so do a given
# model and, without SIZE, the checkpoint of --resume.
is_new_model() {
  if [ "$1" = demo ] || given '--model_dir --model_file' "$@"; then return 1; fi
  [ -n "$size" ] || ! given --resume "$@"
}

# resume_unless_given ARGUMENT...: the same command, run again, continues; --resume and --init_from say what to load.
resume_unless_given() { given '--resume --init_from' "$@" || flags+=(--resume auto); }

# run RECIPE ARGUMENT...: ends by running a recipe with `flags` and then the user's, which win. --print only shows the command.
run() {
  local recipe=$ROOT/recipes/$1.py arguments=() argument print='' launcher=python; shift
  for argument in "$@"; do
    if [ "$argument" = --print ]; then print=yes; else arguments+=("$argument"); fi
  done
  set -- "$recipe" "${flags[@]}" ${arguments[@]+"${arguments[@]}"}
  if [ "$gpus" -gt 1 ]; then launcher=torchrun; set -- --standalone --nproc_per_node "$gpus" "$@"; fi
  if [ -n "$print" ]; then answer "$launcher$(printf ' %q' "$@")"; fi
  ensure_python requirements.txt
  if [ "$launcher" = torchrun ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS-1} # torchrun's own default, without its warning
    set -- -c "$MODULE" torch.distributed.run "$@"
  fi
  exec "$PYTHON" "$@"
}
