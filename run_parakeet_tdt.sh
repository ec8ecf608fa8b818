#!/usr/bin/env bash
# Fine-tunes Parakeet-TDT with a preset for the GPU's memory. Without arguments it trains a small
# model on a synthetic corpus.
#   ./run_parakeet_tdt.sh [TIER] [SIZE] [DATA] [any flag of recipes/parakeet_tdt.py] [--print]
#   GPUS=2 ./run_parakeet_tdt.sh ...    trains on two GPUs, with the same update; also 4 and 8
#   NODES, NODE, HEAD and --sharded: docs/several_gpus.md
# TIER: auto (default), 4gb, 6gb, 8gb, 12gb, t4, 16gb, 24gb, a100, cpu.
# SIZE: demo (default; with your data a small model, for a CPU), 0.6b (default with --model_dir,
# --model_file, --train_manifest, --from_scratch or --init_from), 110m, nemotron. A model from
# scratch has this size. A model from --model_dir or --model_file has its own size, and SIZE only
# picks the row of the table: 110m by itself for files of less than 1,000 MB, such as
# parakeet-tdt_ctc-110m.
# DATA: auto (default: by the hours of speech in --train_manifest), small_data (under 2 h),
# medium_data (under 20 h), large_data.
# An update is 120 utterances in every tier, 48 with medium_data, 16 with small_data, 8 in the demo.
# The tier decides how many of them are on the GPU at once.
# --print shows the command instead of running it. All flags of the recipe:
#   python recipes/parakeet_tdt.py --help all
# The output is written in runs/parakeet_tdt, unless --output_dir names another folder.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_parakeet_tdt.sh
set -eo pipefail
# shellcheck source=common/env.sh
. "$(dirname "$0")/common/env.sh"

usual=0.6b # the size with one of the next flags, which bring a model or data; else it is demo
brings='--model_dir --model_file --train_manifest --from_scratch --init_from'
light='110m 1000' # the size for a model whose file has less than 1,000 MB
always='--output_dir runs/parakeet_tdt' # a folder of its own for each recipe

# R: --gradient_checkpointing, 8: --optimizer adamw_8bit, G: --use_cpu_offload gradients,
# W: --use_cpu_offload weights. S: counts with --sharded only, L with --lora only
rows='
#tier size batch accumulation what
*     demo 8 1
4gb   110m 2 60
4gb   0.6b S 15 8 R --eval_batch_size 4
4gb   0.6b L 10 12 R --eval_batch_size 4
4gb   0.6b 24 5 R W --eval_batch_size 4
4gb   nemotron 20 6 R W --eval_batch_size 4
6gb   110m 10 12
6gb   0.6b L 5 24 --eval_batch_size 4
6gb   0.6b 40 3 R G --eval_batch_size 4
6gb   nemotron L 4 30 --eval_batch_size 4
6gb   nemotron 40 3 R G --eval_batch_size 4
8gb   110m 15 8
8gb   0.6b S 15 8 R --eval_batch_size 4
8gb   0.6b L 8 15 --eval_batch_size 4
8gb   0.6b 8 15 R 8 --eval_batch_size 4
8gb   nemotron L 6 20 --eval_batch_size 4
8gb   nemotron 2 60 R 8 --eval_batch_size 4
12gb  110m 30 4
12gb  0.6b 4 30 8
12gb  nemotron 3 40 8
t4    110m 40 3
t4    0.6b 8 15 8
t4    nemotron 6 20 8
16gb  110m 40 3
16gb  0.6b 5 24
16gb  nemotron 4 30
24gb  110m 60 2
24gb  0.6b 15 8 --eval_batch_size 10
24gb  nemotron 12 10 --eval_batch_size 10
a100  110m 120 1 --eval_batch_size 10
a100  0.6b 60 2 --eval_batch_size 10
a100  nemotron 60 2 --eval_batch_size 10
cpu   *    4 30 R
'
# What is added, as common/preset.py describes it. `new`: a model from scratch. SIZE is the size.
adds='
new unless --init_from: --from_scratch --model_size SIZE
'
run parakeet_tdt "$@"
