#!/usr/bin/env bash
# Fine-tunes XTTS-v2 with a preset for the GPU's memory, and speaks held-out sentences into
# runs/xtts_amharic/speech. It needs released weights (--model_dir) and recordings (--train_manifest).
#   ./run_xtts_amharic.sh [TIER] [SIZE] [DATA] [any flag of recipes/xtts_amharic.py] [--print]
#   GPUS=2 ./run_xtts_amharic.sh ...    trains on two GPUs, with the same update; also 4 and 8
#   NODES, NODE, HEAD and --sharded: docs/several_gpus.md
# TIER: auto (default), 4gb, 6gb, 8gb, 12gb, t4, 16gb, 24gb, a100, cpu. An A100 with 40 GB takes 24gb.
# SIZE: full, the only one.
# DATA: auto (default: by the hours of speech in --train_csv or --train_manifest), small_data (under
# 2 h), medium_data (under 20 h), large_data.
# An update is 240 utterances in every tier, 48 with medium_data, 16 with small_data. The tier decides
# how many of them are on the GPU at once.
# --print shows the command instead of running it. All flags of the recipe:
#   python recipes/xtts_amharic.py --help all
# The output is written in runs/xtts_amharic, unless --output_dir names another folder.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_xtts_amharic.sh
set -eo pipefail
# shellcheck source=common/env.sh
. "$(dirname "$0")/common/env.sh"

brings='--model_dir --train_manifest --train_csv --init_from' # flags that bring a model or data
always='--output_dir runs/xtts_amharic' # a folder of its own for each recipe

# R: --gradient_checkpointing, 8: --optimizer adamw_8bit, G: --use_cpu_offload gradients,
# W: --use_cpu_offload weights. S: counts with --sharded only, L with --lora only
rows='
#tier size batch accumulation what
4gb   full S 15 16 R
4gb   full L 12 20 R
4gb   full 16 15 R W
6gb   full L 20 12 R
6gb   full 6 40 W
8gb   full S 24 10 R
8gb   full L 40 6 R
8gb   full 20 12 R 8
12gb  full 8 30 8
t4    full 8 30
16gb  full 10 24
24gb  full 16 15
a100  full 80 3
cpu   full 4 60 R
'
run xtts_amharic "$@"
