#!/usr/bin/env bash
# Fine-tunes omniASR, XLS-R and other wav2vec 2.0 models with a preset for the GPU's memory. Without
# arguments it trains a small model on a synthetic corpus.
#   ./run_wav2vec2_ctc.sh [TIER] [SIZE] [DATA] [any flag of recipes/wav2vec2_ctc.py] [--print]
#   GPUS=2 ./run_wav2vec2_ctc.sh ...    trains on two GPUs, with the same update; also 4 and 8
#   NODES, NODE, HEAD and --sharded: docs/several_gpus.md
# TIER: auto (default), 4gb, 6gb, 8gb, 12gb, t4, 16gb, 24gb, a100, cpu.
# SIZE: demo (default; with your data a small model, for a CPU), 300m (default with --model_dir,
# --model_file, --train_manifest, --from_scratch or --init_from), 1b. A model from --model_dir or
# --model_file has its own size, and SIZE only picks the row of the table: say 1b for omniASR-
# CTC-1B, XLS-R 1b and MMS-1b.
# DATA: auto (default: by the hours of speech in --train_manifest), small_data (under 2 h),
# medium_data (under 20 h), large_data.
# An update is 120 utterances in every tier, 48 with medium_data, 16 with small_data, 8 in the demo.
# The tier decides how many of them are on the GPU at once.
# --print shows the command instead of running it. All flags of the recipe:
#   python recipes/wav2vec2_ctc.py --help all
# The output is written in runs/wav2vec2_ctc, unless --output_dir names another folder.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_wav2vec2_ctc.sh
set -eo pipefail
# shellcheck source=common/env.sh
. "$(dirname "$0")/common/env.sh"

usual=300m # the size with one of the next flags, which bring a model or data; else it is demo
brings='--model_dir --model_file --train_manifest --from_scratch --init_from'
always='--output_dir runs/wav2vec2_ctc' # a folder of its own for each recipe

# R: --gradient_checkpointing, 8: --optimizer adamw_8bit, G: --use_cpu_offload gradients,
# W: --use_cpu_offload weights. S: counts with --sharded only, L with --lora only
rows='
#tier size batch accumulation what
*     demo 8 1
4gb   300m L 4 30 R
4gb   300m 15 8 R W
4gb   1b   L 2 60 R --optimizer adamw_8bit
4gb   1b   4 30 R W
6gb   300m 10 12 R 8
6gb   1b   L 4 30 R
6gb   1b   12 10 R W
8gb   300m 10 12 R
8gb   1b   L 8 15 R
8gb   1b   12 10 R G
12gb  300m 30 4 R
12gb  1b   2 60 R 8
t4    300m 8 15
t4    1b   6 20 R 8
16gb  300m 10 12
16gb  1b   15 8 R 8
24gb  300m 15 8
24gb  1b   20 6 R
a100  300m 60 2
a100  1b   24 5
cpu   *    4 30 R
'
# What is added, as common/preset.py describes it. `new`: a model from scratch. SIZE is the size.
adds='
new unless --init_from: --from_scratch --model_size SIZE
'
run wav2vec2_ctc "$@"
