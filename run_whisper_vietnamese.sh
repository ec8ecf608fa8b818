#!/usr/bin/env bash
# Whisper for Vietnamese with a preset for the memory at hand; no argument and no data needed.
#   ./run_whisper_vietnamese.sh [TIER] [SIZE] [any flag of recipes/whisper_vietnamese.py] [--print]
# TIER: auto (default), a100, 24gb, 16gb, 8gb, cpu. SIZE: demo (default without data and model), base (default with
# either), tiny, small, medium, large, turbo. With --model_dir or --model_file, whose shape is their own, SIZE only picks
# the row of memory options; without them it is the size of a model from scratch.
# An update is 24 utterances in every tier, 16 in the demo; a tier decides only how many of them are on the GPU at once.
# --print shows the command instead of running it; python recipes/whisper_vietnamese.py --help lists its flags.
# Everything is written under runs/whisper_vietnamese/, unless --output_dir says where.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_whisper_vietnamese.sh
set -euo pipefail
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common/env.sh"
help_if_asked "$@"

tier=auto size='' row=demo device=cpu model='' data=''
if [ $# -gt 0 ] && [[ $1 != -* ]]; then tier=$1; shift; fi
if [ $# -gt 0 ] && [[ $1 != -* ]]; then size=$1; shift; fi
if [ "$tier" = auto ]; then
  tier=$(pick_tier a100:70000 24gb:22000 16gb:15900 8gb:0)
  device=auto # nvidia-smi may be missing where there is a GPU; torch knows, and says why it is not used
  echo "tier: $tier (auto)" >&2
fi
case "$tier" in
  a100 | 24gb | 16gb | 8gb | cpu) ;;
  *) fail "no tier '$tier': it is auto, a100, 24gb, 16gb, 8gb or cpu; a size comes after it" 2 ;;
esac
if given --model_dir "$@" || given --model_file "$@"; then model=yes; fi
if given --train_manifest "$@"; then data=yes; fi
if [ -n "$size$model$data" ]; then row=${size:-base}; fi

memory_options "$@"
# Micro-batch, accumulation, and what makes them fit.
# shellcheck disable=SC2206 # into words
case "$tier:$row" in
  *:demo)      fit=(16 1) ;;
  a100:tiny | a100:base | a100:small | a100:medium) fit=(24 1) ;;
  a100:large | a100:turbo) fit=(12 2) ;;
  24gb:tiny | 24gb:base)   fit=(24 1) ;;
  24gb:small)  fit=(12 2) ;;
  24gb:medium) fit=(24 1 $recompute) ;;
  24gb:large)  fit=(8 3 $recompute $bits) ;;
  24gb:turbo)  fit=(12 2 $recompute) ;;
  16gb:tiny | 16gb:base)   fit=(24 1) ;;
  16gb:small)  fit=(8 3) ;;
  16gb:medium) fit=(12 2 $recompute $bits) ;;
  16gb:large)  fit=(12 2 $recompute $frozen $bits) ;;
  16gb:turbo)  fit=(12 2 $recompute $bits) ;;
  8gb:tiny)    fit=(24 1) ;;
  8gb:base)    fit=(6 4) ;; # as the guide has it; 22 clips of 30 s are predicted to fit
  8gb:small)   fit=(12 2 $recompute) ;;
  8gb:medium)  fit=(12 2 $recompute $frozen $host) ;;
  8gb:large)   fail "large does not fit in tier 8gb, even with its encoder frozen: take turbo, medium or small" 2 ;;
  8gb:turbo)   fit=(12 2 $recompute $frozen) ;;
  cpu:tiny | cpu:base) fit=(8 3) ;;
  cpu:small)   fit=(4 6) ;;
  cpu:medium | cpu:large | cpu:turbo) fit=(2 12 $recompute) ;;
  *) fail "no size '$size': it is demo, tiny, base, small, medium, large or turbo" 2 ;;
esac

# A folder of its own: where it is started, another recipe's run may have its checkpoints.
flags=(--output_dir runs/whisper_vietnamese --mixed_precision)
if [ "$tier" = cpu ]; then flags+=(--device "$device"); fi
if given --transcribe "$@" || given --evaluate "$@"; then
  run "$ROOT/recipes/whisper_vietnamese.py" "${flags[@]}" -- "$@" # they train nothing
  exit
fi
if [ "$row" = demo ] && [ -n "$model$data" ]; then
  fail "size demo is a run on synthetic speech from scratch: with --model_dir, --model_file or --train_manifest take base or another" 2
fi
refuse_frozen "$tier" "$row" "$model" "${fit[*]}" "$@"
flags=(--batch_size "${fit[0]}" --gradient_accumulation_steps "${fit[1]}" "${fit[@]:2}" "${flags[@]}")
# Without --model_dir or --model_file the size is the model's, unless --resume says it.
if [ -z "$model" ] && [ "$row" != demo ] && { [ -n "$size" ] || ! given --resume "$@"; }; then
  flags+=(--from_scratch --model_size "${row/#large/large-v3}")
  # The guide's rate; the recipe's own for this width is pre-training's.
  flags+=(--learning_rate 1e-4)
fi
if [ -n "$data" ]; then # the guide's run
  given --num_epochs "$@" || flags+=(--max_steps 50000)
  flags+=(--warmup_steps 1000 --lr_schedule cosine --eval_every 1000 --save_every 1000 --keep_last 5 --max_target_tokens 256)
fi
# Run again, it goes on where it was; --resume and --init_from say themselves what to load.
given --resume "$@" || given --init_from "$@" || flags+=(--resume auto)

run "$ROOT/recipes/whisper_vietnamese.py" "${flags[@]}" -- "$@"
