#!/usr/bin/env bash
# Whisper for Morse with a preset for the memory at hand; no argument and no data needed.
#   ./run_whisper_morse.sh [TIER] [SIZE] [any flag of recipes/whisper_morse.py] [--print]
# TIER: auto (default), 32gb, 24gb, 16gb, 8gb, cpu. SIZE: demo (default without any of the flags that follow), small
# (default with --model_dir, --model_file, --data_dir, --train_manifest, --conditions or --from_scratch), tiny, base, medium,
# large, turbo; many: small for very large data sets. With --model_dir or --model_file, whose shape is their own, SIZE only
# picks the row of memory options; without them it is the size of a model from scratch.
# An update is 96 clips in every tier (many: 256), 24 in the demo; a tier decides only how many are on the GPU at once.
# --print shows the command instead of running it; python recipes/whisper_morse.py --help lists its flags.
# Everything is written under runs/whisper_morse/, unless --output_dir says where.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_whisper_morse.sh
set -euo pipefail
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common/env.sh"
help_if_asked "$@"

tier=auto size='' row=demo device=cpu model='' task=''
if [ $# -gt 0 ] && [[ $1 != -* ]]; then tier=$1; shift; fi
if [ $# -gt 0 ] && [[ $1 != -* ]]; then size=$1; shift; fi
if [ "$tier" = auto ]; then
  tier=$(pick_tier 32gb:31000 24gb:22000 16gb:15900 8gb:0)
  device=auto # nvidia-smi may be missing where there is a GPU; torch knows, and says why it is not used
  echo "tier: $tier (auto)" >&2
fi
case "$tier" in
  32gb | 24gb | 16gb | 8gb | cpu) ;;
  *) fail "no tier '$tier': it is auto, 32gb, 24gb, 16gb, 8gb or cpu; a size comes after it" 2 ;;
esac
if given --model_dir "$@" || given --model_file "$@"; then model=yes; fi
for flag in --data_dir --train_manifest --conditions --from_scratch; do
  if given "$flag" "$@"; then task=yes; fi
done
if [ -n "$size$model$task" ]; then row=${size:-small}; fi

memory_options "$@"
# Micro-batch, accumulation, and what makes them fit.
# shellcheck disable=SC2206 # into words
case "$tier:$row" in
  *:demo)      fit=(24 1) ;;
  32gb:tiny | 24gb:tiny) fit=(96 1) ;;
  32gb:base | 24gb:base) fit=(48 2) ;;
  32gb:small | 24gb:small | 16gb:small) fit=(48 2 $recompute) ;;
  32gb:many | 24gb:many | 16gb:many)    fit=(64 4 $recompute) ;;
  32gb:medium) fit=(32 3 $recompute) ;;
  32gb:large)  fit=(16 6 $recompute $bits) ;;
  32gb:turbo)  fit=(32 3 $recompute) ;;
  24gb:medium) fit=(24 4 $recompute) ;;
  24gb:large)  fit=(8 12 $recompute $bits) ;;
  24gb:turbo)  fit=(16 6 $recompute) ;;
  16gb:tiny | 16gb:base) fit=(48 2) ;;
  16gb:medium) fit=(16 6 $recompute $bits) ;;
  16gb:large)  fit=(16 6 $recompute $frozen $bits) ;;
  16gb:turbo)  fit=(12 8 $recompute $bits) ;;
  8gb:tiny)    fit=(32 3) ;;
  8gb:base)    fit=(16 6) ;;
  8gb:small)   fit=(16 6 $recompute) ;;
  8gb:many)    fit=(16 16 $recompute) ;;
  8gb:medium)  fit=(24 4 $recompute $frozen $host) ;;
  8gb:large)   fail "large does not fit in tier 8gb, even with its encoder frozen: take turbo, medium or small" 2 ;;
  8gb:turbo)   fit=(24 4 $recompute $frozen) ;;
  cpu:tiny | cpu:base) fit=(12 8) ;;
  cpu:small)   fit=(4 24) ;;
  cpu:many)    fit=(4 64) ;;
  cpu:medium | cpu:large | cpu:turbo) fit=(2 48 $recompute) ;;
  *) fail "no size '$size': it is demo, tiny, base, small, many, medium, large or turbo" 2 ;;
esac

# A folder of its own: where it is started, another recipe's run may have its checkpoints.
flags=(--output_dir runs/whisper_morse --mixed_precision)
if [ "$tier" = cpu ]; then flags+=(--device "$device"); fi
if given --transcribe "$@" || given --evaluate "$@" || given --write_dataset "$@"; then
  run "$ROOT/recipes/whisper_morse.py" "${flags[@]}" -- "$@" # they train nothing
  exit
fi
if [ "$row" = demo ] && [ -n "$model$task" ]; then
  fail "size demo is a small model on its own conditions: with a model, recordings or conditions of your own take small or another" 2
fi
refuse_frozen "$tier" "$row" "$model" "${fit[*]}" "$@"
flags=(--batch_size "${fit[0]}" --gradient_accumulation_steps "${fit[1]}" "${fit[@]:2}" "${flags[@]}")
# Synthesis is work for several cores; the demo's is little, and the recipe's own choice does.
case "$tier:$row" in
  cpu:* | *:demo | 8gb:*) ;;
  *:many) flags+=(--dataloader_num_workers 8) ;;
  *)      flags+=(--dataloader_num_workers 6) ;;
esac
# Without --model_dir or --model_file the size is the model's, unless --resume says it.
if [ -z "$model" ] && [ "$row" != demo ] && { [ -n "$size" ] || ! given --resume "$@"; }; then
  name=${row/#large/large-v3}
  flags+=(--from_scratch --model_size "${name/#many/small}")
fi
# Run again, it goes on where it was; --resume and --init_from say themselves what to load.
given --resume "$@" || given --init_from "$@" || flags+=(--resume auto)

run "$ROOT/recipes/whisper_morse.py" "${flags[@]}" -- "$@"
