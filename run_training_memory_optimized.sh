#!/usr/bin/env bash
# Trains the Konkani Conformer with a preset for the GPU's memory. Without arguments it trains on a
# synthetic corpus.
#   ./run_training_memory_optimized.sh [TIER] [SIZE] [any flag of recipes/konkani_conformer.py] [--print]
#   GPUS=2 ./run_training_memory_optimized.sh ...    trains on two GPUs, with the same update
#   NODES, NODE, HEAD and --sharded: docs/several_gpus.md
# TIER: auto (default), 4gb, 6gb, 8gb, t4, 16gb, 24gb, a100, cpu.
# SIZE: optimized (default), minimal, original.
# An update is 8 utterances in every tier. The tier decides how many of them are on the GPU at once.
# --print shows the command instead of running it. All flags of the recipe:
#   python recipes/konkani_conformer.py --help all
# The output is written in the current folder, unless --output_dir names another folder.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_training_memory_optimized.sh
set -eo pipefail
# shellcheck source=common/env.sh
. "$(dirname "$0")/common/env.sh"

usual=optimized # the size, where the user gives none

rows='
#tier size      batch accumulation, or flags
*     minimal   + --d_model 128 --encoder_layers 6 --decoder_layers 3
*     optimized + --d_model 192 --encoder_layers 8 --decoder_layers 4
*     original  + --d_model 256 --encoder_layers 12 --decoder_layers 6
*     *         + --empty_cache_every 50
4gb   *         8 1
6gb   *         8 1
8gb   *         8 1
t4    *         2 4
16gb  *         8 1
24gb  *         8 1
a100  *         8 1
cpu   *         8 1
'
run konkani_conformer "$@"
