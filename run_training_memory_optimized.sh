#!/usr/bin/env bash
# Konkani Conformer with a preset for the memory at hand; no argument and no data needed.
#   ./run_training_memory_optimized.sh [TIER] [SIZE] [any flag of recipes/konkani_conformer.py] [--print]
# TIER: auto (default), a100, 24gb, 16gb, t4, 8gb, cpu. SIZE: optimized (default), minimal, original.
# An update is 8 utterances in every tier; a tier decides only how many of them are on the GPU at once.
# --print shows the command instead of running it; python recipes/konkani_conformer.py --help lists its flags.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_training_memory_optimized.sh
set -euo pipefail
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common/env.sh"
help_if_asked "$@"

tier=auto size=optimized device=cpu
if [ $# -gt 0 ] && [[ $1 != -* ]]; then tier=$1; shift; fi
if [ $# -gt 0 ] && [[ $1 != -* ]]; then size=$1; shift; fi
if [ "$tier" = auto ]; then
  tier=$(pick_tier a100:70000 24gb:22000 16gb:15900 t4:11000 8gb:0)
  device=auto # nvidia-smi may be missing where there is a GPU; torch knows, and says why it is not used
  echo "tier: $tier (auto)" >&2
fi

case "$tier" in
  a100 | 24gb | 16gb) flags=(--batch_size 8 --gradient_accumulation_steps 1) ;;
  8gb)  flags=(--batch_size 4 --gradient_accumulation_steps 2) ;;
  t4)   flags=(--batch_size 2 --gradient_accumulation_steps 4) ;;
  cpu)  flags=(--batch_size 8 --gradient_accumulation_steps 1 --device "$device") ;;
  *) fail "no tier '$tier': it is auto, a100, 24gb, 16gb, t4, 8gb or cpu; a size comes after it" 2 ;;
esac
case "$size" in
  optimized) flags+=(--d_model 192 --encoder_layers 8 --decoder_layers 4) ;;
  minimal)   flags+=(--d_model 128 --encoder_layers 6 --decoder_layers 3) ;;
  original)  flags+=(--d_model 256 --encoder_layers 12 --decoder_layers 6) ;;
  *) fail "no size '$size': it is optimized, minimal or original" 2 ;;
esac
flags+=(--mixed_precision --empty_cache_every 50)
# Run again, it goes on where it was; --resume, --init_from and --transcribe say themselves what to load.
given --resume "$@" || given --init_from "$@" || given --transcribe "$@" || flags+=(--resume auto)

run "$ROOT/recipes/konkani_conformer.py" "${flags[@]}" -- "$@"
