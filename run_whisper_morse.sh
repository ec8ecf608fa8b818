#!/usr/bin/env bash
# Trains Whisper on Morse code with a preset for the GPU's memory. Without arguments it trains a small
# model on synthetic clips.
#   ./run_whisper_morse.sh [TIER] [SIZE] [DATA] [any flag of recipes/whisper_morse.py] [--print]
#   GPUS=2 ./run_whisper_morse.sh ...    trains on two GPUs, with the same update
#   NODES, NODE, HEAD and --sharded: docs/several_gpus.md
# TIER: auto (default), 4gb, 6gb, 8gb, 12gb, t4, 16gb, 24gb, 32gb, cpu.
# SIZE: demo (default; with your data a small model, for a CPU), small (default with --model_dir,
# --model_file, --data_dir, --train_manifest, --conditions or --from_scratch), tiny, base, medium,
# large, turbo; many: small for very large data sets. A model from scratch has this size. A model
# from --model_dir or --model_file has its own size, and SIZE only picks the row of the table.
# DATA: auto (default: by the hours of recordings in --train_manifest or --data_dir), small_data
# (under 2 h), medium_data (under 20 h), large_data.
# An update is 96 clips in every tier (many: 256, medium_data: 48, small_data: 16, demo: 24). The
# tier decides how many of them are on the GPU at once.
# --print shows the command instead of running it. All flags of the recipe:
#   python recipes/whisper_morse.py --help all
# The output is written in runs/whisper_morse, unless --output_dir names another folder.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_whisper_morse.sh
set -eo pipefail
# shellcheck source=common/env.sh
. "$(dirname "$0")/common/env.sh"

usual=small # the size with one of the next flags, which bring a model or data; else it is demo
brings='--model_dir --model_file --data_dir --train_manifest --conditions --from_scratch'
always='--output_dir runs/whisper_morse' # a folder of its own for each recipe

# R: --gradient_checkpointing, F: --freeze_encoder, 8: --optimizer adamw_8bit, H: --use_cpu_offload,
# G: --use_cpu_offload gradients, W: --use_cpu_offload weights. S: counts with --sharded only.
# Larger GPUs need the clips of several data workers.
rows='
#tier size   batch accumulation what, or flags
*     demo   24 1
4gb   tiny   24 4
4gb   base   8 12
4gb   small  6 16 R H
4gb   many   4 64 R H
4gb   *      ! small, base or tiny
6gb   tiny   32 3
6gb   base   16 6
6gb   small  3 32 8
6gb   many   2 128 8
6gb   medium 6 16 R G
6gb   *      ! medium, small or base
8gb   tiny   48 2
8gb   base   24 4
8gb   small  4 24
8gb   many   4 64
8gb   medium 12 8 R G
8gb   large  S 6 16 R --eval_batch_size 2
8gb   large  8 12 R W --eval_batch_size 4
8gb   turbo  8 12 R G
12gb  tiny   96 1
12gb  base   48 2
12gb  small  12 8
12gb  many   8 32
12gb  medium 8 12 R 8
12gb  large  8 12 R G --eval_batch_size 4
12gb  turbo  4 24 R 8
t4    tiny   96 1
t4    base   48 2
t4    small  16 6
t4    many   16 16
t4    medium 2 48 8
t4    large  S 1 96 R --eval_batch_size 2
t4    large  24 4 R F 8
t4    turbo  12 8 R 8
16gb  many   16 16 --dataloader_num_workers 8
16gb  *      + --dataloader_num_workers 6
16gb  tiny   96 1
16gb  base   48 2
16gb  small  16 6
16gb  medium 3 32 8
16gb  large  S 2 48 R --eval_batch_size 4
16gb  large  12 8 R G
16gb  turbo  2 48 8
24gb  many   32 8 --dataloader_num_workers 8
24gb  *      + --dataloader_num_workers 6
24gb  tiny   96 1
24gb  base   96 1
24gb  small  32 3
24gb  medium 4 24
24gb  large  12 8 R 8
24gb  turbo  3 32
32gb  many   32 8 --dataloader_num_workers 8
32gb  *      + --dataloader_num_workers 6
32gb  tiny   96 1
32gb  base   96 1
32gb  small  48 2
32gb  medium 12 8
32gb  large  12 8 R
32gb  turbo  8 12
cpu   tiny   12 8
cpu   base   12 8
cpu   small  4 24
cpu   many   4 64
cpu   *      2 48 R
'
# What is added, as common/preset.py describes it. `new`: a model from scratch. SIZE is the size.
adds='
new unless large many: --from_scratch --model_size SIZE
new large: --from_scratch --model_size large-v3
new many: --from_scratch --model_size small
many --data_dir unless --max_steps: --num_epochs 3 # as in the guide
'
run whisper_morse "$@"
