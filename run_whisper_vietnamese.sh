#!/usr/bin/env bash
# Trains Whisper on Vietnamese with a preset for the GPU's memory. Without arguments it trains a small
# model on a synthetic corpus.
#   ./run_whisper_vietnamese.sh [TIER] [SIZE] [DATA] [any flag of recipes/whisper_vietnamese.py] [--print]
#   GPUS=2 ./run_whisper_vietnamese.sh ...    trains on two GPUs, with the same update
#   NODES, NODE, HEAD and --sharded: docs/several_gpus.md
# TIER: auto (default), 4gb, 6gb, 8gb, 12gb, t4, 16gb, 24gb, a100, cpu.
# SIZE: demo (default; with your data a small model, for a CPU), base (default with --model_dir,
# --model_file or --train_manifest), tiny, small, medium, large, turbo. A model from scratch has
# this size. A model from --model_dir or --model_file has its own size, and SIZE only picks the row
# of the table.
# DATA: auto (default: by the hours of speech in --train_manifest), small_data (under 2 h),
# medium_data (under 20 h), large_data.
# An update is 24 utterances in every tier, 16 with small_data and in the demo. The tier decides how
# many of them are on the GPU at once. large_data trains as the guide does, for 50,000 updates; from
# a released model for ten epochs, if they are fewer.
# --print shows the command instead of running it. All flags of the recipe:
#   python recipes/whisper_vietnamese.py --help all
# The output is written in runs/whisper_vietnamese, unless --output_dir names another folder.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_whisper_vietnamese.sh
set -eo pipefail
# shellcheck source=common/env.sh
. "$(dirname "$0")/common/env.sh"

usual=base # the size with one of the next flags, which bring a model or data; else it is demo
brings='--model_dir --model_file --train_manifest'
always='--output_dir runs/whisper_vietnamese' # a folder of its own for each recipe

# R: --gradient_checkpointing, F: --freeze_encoder, 8: --optimizer adamw_8bit, H: --use_cpu_offload,
# G: --use_cpu_offload gradients, W: --use_cpu_offload weights. S: counts with --sharded only, L with
# --lora only
rows='
#tier size   batch accumulation what
*     demo   16 1
4gb   tiny   24 1
4gb   base   8 3
4gb   small  6 4 R H
4gb   medium L 2 12 R --eval_batch_size 4
4gb   large  ! small, base or tiny
4gb   turbo  L 2 12 R --eval_batch_size 4
4gb   *      ! small, base or tiny
6gb   tiny   24 1
6gb   base   12 2
6gb   small  3 8 8
6gb   medium L 12 2 R
6gb   medium 6 4 R G
6gb   large  L 2 12 R --eval_batch_size 2
6gb   turbo  L 8 3 R --eval_batch_size 4
6gb   *      ! medium, small or base
8gb   tiny   24 1
8gb   base   24 1
8gb   small  4 6
8gb   medium 12 2 R G
8gb   large  S 3 8 R --eval_batch_size 2
8gb   large  L 8 3 R --eval_batch_size 4
8gb   large  8 3 R W --eval_batch_size 4
8gb   turbo  L 12 2 R
8gb   turbo  8 3 R G
12gb  tiny   24 1
12gb  base   24 1
12gb  small  12 2
12gb  medium L 6 4
12gb  medium 8 3 R 8
12gb  large  L 3 8
12gb  large  8 3 R G --eval_batch_size 4
12gb  turbo  4 6 R 8
t4    tiny   24 1
t4    base   24 1
t4    small  12 2
t4    medium 2 12 8
t4    large  S 1 24 R --eval_batch_size 2
t4    large  L 8 3 R --eval_batch_size 4
t4    large  24 1 R F 8
t4    turbo  12 2 R 8
16gb  tiny   24 1
16gb  base   24 1
16gb  small  12 2
16gb  medium 3 8 8
16gb  large  S 2 12 R --eval_batch_size 4
16gb  large  L 4 6
16gb  large  12 2 R G
16gb  turbo  2 12 8
24gb  tiny   24 1
24gb  base   24 1
24gb  small  24 1
24gb  medium 4 6
24gb  large  12 2 R 8
24gb  turbo  3 8
a100  large  12 2
a100  *      24 1
cpu   tiny   8 3
cpu   base   8 3
cpu   small  4 6
cpu   *      2 12 R
'
# What is added, as common/preset.py describes it. `new`: a model from scratch. SIZE is the size.
# The learning rate is the guide's, not the recipe's; with large_data all of the run is.
adds='
new unless large demo: --from_scratch --model_size SIZE --learning_rate 1e-4
new demo: --from_scratch --model_size demo
new large: --from_scratch --model_size large-v3 --learning_rate 1e-4
--train_manifest: --max_target_tokens 256
--train_manifest large_data unless --num_epochs: --max_steps 50000
--train_manifest large_data unless --num_epochs --max_steps new: --num_epochs 10
--train_manifest large_data: --warmup_steps 1000 --lr_schedule cosine
--train_manifest large_data: --eval_every 1000 --save_every 1000 --keep_last 5
'
run whisper_vietnamese "$@"
