# Sourced by the run_*.sh scripts. From top to bottom: the Python environment, the allocator, the
# tier, the row of the script's table, and the start of the recipe.
# shellcheck shell=bash disable=SC2034,SC2154 # the script reads and sets some of the variables
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
trap 'exit 130' INT # Ctrl-C ends the script together with an installation

say() { echo "$1" >&2; }

# fail MESSAGE [STATUS]
fail() {
  echo "error: $1" >&2
  exit "${2:-1}"
}

# has WORD LIST: whether a list of words, separated by spaces, has this word.
has() { case " $2 " in *" $1 "*) ;; *) return 1 ;; esac; }

# --- the Python environment ---

# is_supported PYTHON: whether this interpreter runs, and torch has wheels for its version.
is_supported() { "$1" -c 'import sys; assert (3, 10) <= sys.version_info < (3, 15)' 2>/dev/null; }

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
    for base in "$active" python3.12 python3.11 python3.13 python3.10; do
      if is_supported "$base"; then break; fi
    done
    is_supported "$base" ||
      fail "Python 3.10 to 3.14 is needed and ${active:-none} was found: sudo apt install python3 python3-venv"
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

# --- the allocator ---

# CUDA reads these when it starts, under the old or the new name. A user's values stay.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-${PYTORCH_ALLOC_CONF-expandable_segments:True}}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-$PYTORCH_CUDA_ALLOC_CONF}

# --- the tier and the size ---

# A script has a table, the text `rows`. The first row that matches tier and size counts; *
# matches any:
#   TIER SIZE BATCH ACCUMULATION [LETTER...] [FLAG...]
#   TIER SIZE + FLAG...    adds flags to the rows below it
#   TIER SIZE ! SIZES      this size does not fit, SIZES do
#   TIER SIZE S BATCH ACCUMULATION [LETTER...] [FLAG...]    counts with --sharded only
#   TIER SIZE L BATCH ACCUMULATION [LETTER...] [FLAG...]    counts with --lora only
# R is --gradient_checkpointing, F --freeze_encoder, 8 --optimizer adamw_8bit, H --use_cpu_offload,
# G --use_cpu_offload gradients, W --use_cpu_offload weights.

# column NUMBER: prints the words in a column of the table, each once.
column() {
  local words
  words=$(awk -v n="$1" 'NF && !/^#/ && $n != "*" && !seen[$n]++ { print $n }' <<<"$rows")
  echo "${words//$'\n'/ }"
}

# given FLAG...: whether the user gave one of these flags, as FLAG or FLAG=value.
given() {
  local argument flag
  for argument in "${arguments[@]}"; do
    for flag in "$@"; do
      if [ "${argument%%=*}" = "$flag" ]; then return 0; fi
    done
  done
  return 1
}

# value_of FLAG...: prints the words that follow the last of these flags, or nothing.
value_of() {
  local argument flag value='' follows=''
  for argument in "${arguments[@]}"; do
    if [[ $argument != -* ]]; then
      if [ -n "$follows" ]; then value+=${value:+ }$argument; fi
      continue
    fi
    follows=''
    for flag in "$@"; do
      if [ "${argument%%=*}" = "$flag" ]; then
        follows=yes
        value=${argument#"$flag"}
        value=${value#=}
      fi
    done
  done
  echo "$value"
}

# print_help: prints the comment at the head of the script and ends it: the program's own --help would
# need the packages, 5 GB, first.
print_help() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit
}

# read_arguments ARGUMENT...: sets tier, size_given (SIZE, or empty), data (DATA, or auto), arguments
# (what follows them), the GPUs, and the first of the flags. It answers --rows and --help.
read_arguments() {
  local tiers sizes device=cpu words=0
  tiers=$(column 1)
  sizes=$(column 2)
  tier=auto
  size_given=''
  data=auto
  while [ $# -gt 0 ] && [[ $1 != -* ]]; do
    if [ ${#recorded[@]} -gt 0 ] && has "$1" "$DATA"; then
      data=$1
    else
      case $((words += 1)) in
        1) tier=$1 ;;
        2) size_given=$1 ;;
        *) fail "the word '$1' is too much: first come TIER and SIZE, then flags" 2 ;;
      esac
    fi
    shift
  done
  arguments=("$@")
  if given --help -h; then
    print_help
  elif given --rows; then
    echo "$rows"
    exit
  fi
  if [ "$tier" = auto ]; then
    pick_tier "$tiers"
    device=auto # torch may find a GPU where there is no nvidia-smi
    say "tier: $tier (auto)"
  fi
  has "$tier" "$tiers" ||
    fail "no tier '$tier': it is one of auto, ${tiers// /, }; a size comes after it" 2
  has "${size_given:-${sizes%% *}}" "$sizes" ||
    fail "no size '$size_given': it is one of ${sizes// /, }" 2
  flags=(--mixed_precision)
  if [ "$tier" = cpu ]; then flags+=(--device "$device"); fi
  read_gpus
}

# read_gpus: sets gpus (processes on this machine), nodes (machines), node (the number of this one),
# head (where they meet), ranks, the number of processes that share an update, and several, these
# numbers for messages.
read_gpus() {
  local card
  gpus=${GPUS:-1}
  nodes=${NODES:-1}
  node=${NODE:-}
  head=${HEAD:-}
  [[ $gpus =~ ^[1-9][0-9]*$ ]] ||
    fail "GPUS=$gpus: it must be the number of GPUs to train on, such as 2" 2
  [[ $nodes =~ ^[1-9][0-9]*$ ]] ||
    fail "NODES=$nodes: it must be the number of machines, such as 2" 2
  ranks=$((nodes * gpus))
  several=GPUS=$gpus
  if [ "$nodes" -gt 1 ]; then several="NODES=$nodes GPUS=$gpus"; fi
  if given --dry_run; then
    card=$(value_of --dry_run)
    if [[ $card =~ ^[0-9]+\ *[xX] ]]; then
      ranks=${card%%[!0-9]*}
      several=GPUS=$ranks
    elif [ "$ranks" -gt 1 ]; then
      arguments+=(--dry_run "${ranks}x$card")
      say "$several: one process plans for ${ranks}x$card"
    fi
    gpus=1
    nodes=1
  elif [ "$ranks" -gt 1 ] && { only_uses_a_model || given --verify_gpu; }; then
    say "$several is ignored: this command runs in one process"
    gpus=1
    nodes=1
    ranks=1
  elif [ "$nodes" -gt 1 ]; then
    [[ $node =~ ^(0|[1-9][0-9]*)$ && $node -lt $nodes ]] ||
      fail "NODES=$nodes NODE=$node: NODE must be this machine's number, 0 to $((nodes - 1))" 2
    [[ $head =~ ^[^:]+:[0-9]+$ ]] ||
      fail "HEAD=$head: it must be the address of machine 0 and a free port there, such as 192.168.1.5:29500" 2
  fi
}

# The least MiB of each tier. nvidia-smi reports 15,109 to 15,360 for a T4, 16,376 for an RTX 4080
# and 12,282 to 12,288 for cards with 12 GB.
MEMORY='a100:70000 32gb:31000 24gb:22000 16gb:15900 t4:14900 12gb:11500 8gb:7000 6gb:5600 4gb:0'

# pick_tier TIERS: sets tier to the card of a plan, else to the largest of these tiers that the
# first visible GPU has the memory for, or to cpu without a GPU.
pick_tier() {
  local word words memory card gpu=${CUDA_VISIBLE_DEVICES-0}
  local query=(nvidia-smi --query-gpu=memory.total "--format=csv,noheader,nounits")
  if given --dry_run; then
    card=$(value_of --dry_run | tr '[:upper:]' '[:lower:]')
    if [[ $card =~ ^[0-9]+\ *x(.*) ]]; then card=${BASH_REMATCH[1]}; fi # "2x16gb"
    read -ra words <<<"$card"
    for word in "${card// /}" "${words[@]}"; do # "8 GB", "A100 80GB"
      if [ -n "$word" ] && has "$word" "$1"; then tier=$word; fi
    done
    if [ "$tier" != auto ]; then return; fi
  fi
  tier=cpu
  if [ -z "$gpu" ]; then return; fi
  if [[ $gpu != MIG-* ]]; then query+=(-i "${gpu%%,*}"); fi # a slice is not found by its name
  memory=$("${query[@]}" 2>/dev/null) || return 0
  if [[ $memory = *[!0-9]* || $gpu = MIG-* ]]; then memory=0; fi # a slice, or the CPU's memory
  for word in $MEMORY; do
    if has "${word%:*}" "$1"; then
      tier=${word%:*}
      if [ "$memory" -ge "${word#*:}" ]; then return; fi
    fi
  done
}

# --- the row ---

# only_uses_a_model: whether the recipe trains nothing, so that it needs no row. A script has the
# flags that use a model in the array `uses`, and in `trains` those with which an --export follows
# training. Without them it writes the weights of --resume or of a released model.
only_uses_a_model() {
  if given "${uses[@]}"; then return 0; fi
  if ! given --export --export_adapter || ! given --resume --model_dir --model_file; then return 1; fi
  if [ "$(value_of --resume)" = auto ]; then return 1; fi
  ! given "${trains[@]}"
}

# size_or_demo DEFAULT FLAG...: sets size to SIZE if the user gave it, else to DEFAULT with one of
# these flags, which bring a model or data, else to demo.
size_or_demo() {
  local default=$1
  shift
  if ! given "$@"; then
    size=${size_given:-demo}
  elif [ "$size_given" = demo ]; then
    fail "size demo has its own model and data: take $default or another size, or leave out $*" 2
  else
    size=${size_given:-$default}
  fi
}

# How much speech there is: under 2 hours, under 20 hours, more (speech/hours.py). An update has 16
# utterances, 48, or those of the row, and never more than those. A script that has DATA sets
# `recorded` to the flags that name the training data.
DATA='small_data medium_data large_data'
recorded=()

# pick_data: replaces data=auto by the word for the hours of speech in the training data.
pick_data() {
  local manifest answer flag passed=()
  if [ "$data" != auto ]; then return; fi
  data=large_data
  manifest=$(value_of "${recorded[@]}")
  if [ -z "$manifest" ]; then return; fi # which compgen would take for any name
  if [ ! -e "$manifest" ] && ! compgen -G "$manifest" >/dev/null; then return; fi
  if given --print && ! find_python requirements.txt; then
    say "data: $data (auto: the hours of speech are not known before the packages are installed)"
    return
  fi
  given --print || ensure_python requirements.txt
  for flag in --audio_root --max_samples; do
    if given $flag; then passed+=("$flag" "$(value_of $flag)"); fi
  done
  if answer=$("$PYTHON" "$ROOT/speech/hours.py" "$manifest" "${passed[@]}" 2>/dev/null); then
    data=${answer%% *}
    say "data: $data (auto: ${answer#* } h of speech)"
  else
    say "data: $data (auto: the hours of speech are not known)"
  fi
}

# pick_row: adds the flags of the row of tier and size, with the update of data. On several GPUs each
# one takes its share of the update, in micro-batches that are as large as the row allows and divide
# the share. For more than eight the update is rounded up to a multiple: the guides' updates have no
# factor of 16. --sharded needs neither 8 bits nor offloading, and excludes both, as --lora does the
# latter.
pick_row() {
  local row_tier row_size batch accumulation what more='' letters level='' update most share
  local adapters=''
  while read -r row_tier row_size batch what; do
    if [[ $row_tier != "$tier" && $row_tier != '*' ]]; then continue; fi
    if [[ $row_size != "$size" && $row_size != '*' ]]; then continue; fi
    what=${what%%#*}
    case "$batch" in
      +) more+=" $what" ;;
      S) if given --sharded; then read -r batch what <<<"$what" && break; fi ;;
      L)
        if given --lora; then read -r batch what <<<"$what" && break; fi
        adapters=', or add --lora 32'
        ;;
      *) break ;;
    esac
  done <<<"$rows"
  if [ -z "$batch" ]; then fail "size $size has no row in tier $tier: take another size" 2; fi
  if [ "$batch" = ! ]; then fail "$size does not fit in tier $tier: take $what$adapters" 2; fi
  read -r accumulation what <<<"$what"

  update=$((batch * accumulation))
  if [ ${#recorded[@]} -gt 0 ] && [ "$size" != demo ]; then
    pick_data
    case "$data" in small_data) most=16 ;; medium_data) most=48 ;; *) most=$update ;; esac
    if [ "$most" -lt "$update" ]; then update=$most; fi
  elif [ "$data" != auto ]; then
    fail "$data is for your own recordings: add$(printf ' %s or' "${recorded[@]}") a model" 2
  fi
  share=$((update / ranks))
  if [ "$ranks" -gt 8 ] && [ $((share * ranks)) -lt "$update" ]; then
    share=$((share + 1))
    say "update: $((share * ranks)) utterances, because $ranks GPUs do not divide $update"
    update=$((share * ranks))
  fi
  if [ $((share * ranks)) = "$update" ]; then
    while ((share % batch)); do batch=$((batch - 1)); done
    accumulation=$((share / batch))
  elif ! given --batch_size || ! given --gradient_accumulation_steps; then
    fail "$several does not divide an update of $update: take 2, 4 or 8 in all, or give each GPU's --batch_size and --gradient_accumulation_steps" 2
  fi
  flags+=(--batch_size "$batch" --gradient_accumulation_steps "$accumulation")

  letters=${what%%--*}
  for letter in $letters; do
    case "$letter" in
      R) flags+=(--gradient_checkpointing) ;;
      F) flags+=(--freeze_encoder) ;;
      # Of 8 and the levels of --use_cpu_offload the user's choice wins.
      8) given --use_cpu_offload --sharded --lora || flags+=(--optimizer adamw_8bit) ;;
      H) level=states ;;
      G) level=gradients ;;
      W) level=weights ;;
      *) fail "the row of tier $tier and size $size has an unknown letter, $letter" ;;
    esac
  done
  if [ -n "$level" ] && ! given --sharded --lora && [ "$(value_of --optimizer)" != adamw_8bit ]; then
    flags+=(--use_cpu_offload "$level")
  fi
  if has F "$letters" && ! given --model_dir --model_file --resume --dry_run; then
    fail "$size fits in tier $tier only with a frozen encoder of a given model: add --model_dir or --model_file, or take a smaller size" 2
  fi
  # shellcheck disable=SC2206 # words
  flags+=($more ${what#"$letters"})
}

# is_new_model: whether a model from scratch has the size of the row. The demo has its own size, and
# so do a released model and, unless the user gave SIZE, the checkpoint of --resume.
is_new_model() {
  if [ "$size" = demo ] || given --model_dir --model_file; then return 1; fi
  [ -n "$size_given" ] || ! given --resume
}

# --- the start ---

# resume_unless_given: the same command, run again, resumes the run.
resume_unless_given() { given --resume --init_from || flags+=(--resume auto); }

# interface_to HOST: prints the network interface whose address other machines see, if the name of
# this one stands for itself alone (127.0.1.1 in Ubuntu's /etc/hosts): gloo would take that.
interface_to() {
  "$PYTHON" -c '
import fcntl, socket, struct, sys

def is_loopback(address):
    return address.startswith("127.")

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
    out.connect((sys.argv[1], 9))  # sends nothing
    own = out.getsockname()[0]
    if is_loopback(socket.gethostbyname(socket.gethostname())) and not is_loopback(own):
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(out.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == own:
                print(name)
' "$1" 2>/dev/null || true
}

# How often the processes are started anew after one of them has ended: out of memory with --sharded,
# a machine that is lost.
RESTARTS=5

# add_launcher RECIPE: puts torchrun's options before the command, and into `variable` what it reads
# from the environment. Machines meet at HEAD: they wait an hour for one that is missing, and ten
# minutes for an answer of machine 0. torchrun numbers them by address, of which only that of
# machine 0 is used; ~ sorts the others behind it, by NODE.
add_launcher() {
  local address=${head%:*} conf=join_timeout=3600,read_timeout=600
  if [ "$nodes" = 1 ] && ! given --sharded; then
    command=(--standalone --nproc_per_node "$gpus" "${command[@]}")
    return
  fi
  # Without it, processes that start anew find the addresses of those before them, and a machine that
  # comes back finds no address at all (torch 2.11).
  variable=TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  command=(--nproc_per_node "$gpus" --max_restarts "$RESTARTS" "${command[@]}")
  if [ "$nodes" = 1 ]; then
    command=(--standalone --local_addr localhost "${command[@]}")
    return
  fi
  if [ "$node" = 0 ]; then
    conf+=,is_host=1
  else
    conf+=,is_host=0
    address=$(printf '~%05d' "$node")
  fi
  command=(--nnodes "$nodes" --rdzv_backend c10d --rdzv_endpoint "$head" --rdzv_id "$1"
    --rdzv_conf "$conf" --local_addr "$address" "${command[@]}")
}

# run RECIPE: runs a recipe with the preset's flags and then the user's, which win, and does not
# return. --print only shows the command.
run() {
  local command=("$ROOT/recipes/$1.py" "${flags[@]}") launcher=python argument variable=''
  for argument in "${arguments[@]}"; do
    if [ "$argument" != --print ]; then command+=("$argument"); fi
  done
  if [ "$ranks" -gt 1 ] && ! given --dry_run; then
    launcher=torchrun
    add_launcher "$1"
  fi
  if given --print; then
    echo "${variable:+$variable }$launcher$(printf ' %q' "${command[@]}")"
    exit
  fi
  ensure_python requirements.txt
  if [ "$launcher" = torchrun ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS-1} # torchrun's own default, without its warning
    if [ "$nodes" -gt 1 ] && [ -z "${GLOO_SOCKET_IFNAME-}" ]; then
      GLOO_SOCKET_IFNAME=$(interface_to "${head%:*}")
      if [ -n "$GLOO_SOCKET_IFNAME" ]; then export GLOO_SOCKET_IFNAME; fi
    fi
    if [ -n "$variable" ]; then export "${variable?}"; fi
    command=(-m torch.distributed.run "${command[@]}")
  fi
  export PRESET_TIER=$tier # for best.json
  exec "$PYTHON" "${command[@]}"
}
