#!/usr/bin/env bash
# Trains a voice of one's own with a preset for the GPU's memory. Without arguments it generates
# synthetic speech, trains a small Matcha-TTS on it, and speaks held-out sentences into
# runs/matcha_voice/speech.
#   ./run_matcha_voice.sh [TIER] [SIZE] [DATA] [any flag of recipes/matcha_voice.py] [--print]
#   GPUS=2 ./run_matcha_voice.sh ...    trains on two GPUs, with the same update; also 4 and 8
#   NODES, NODE, HEAD and --sharded: docs/several_gpus.md
# TIER: auto (default), 4gb, 6gb, 8gb, t4, 16gb, 24gb, a100, cpu. An A100 with 40 GB takes 24gb.
# SIZE: demo (default; with your data a small model, for a CPU), full (default with
# --train_manifest, --model_file or --init_from), large.
# DATA: auto (default: by the hours of speech in --train_manifest), small_data (under 2 h),
# medium_data (under 20 h), large_data.
# An update is 32 utterances in every tier, 16 with small_data and in the demo. The tier decides how
# many of them are on the GPU at once.
# --print shows the command instead of running it. All flags of the recipe:
#   python recipes/matcha_voice.py --help all
# The output is written in runs/matcha_voice, unless --output_dir names another folder.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # sh run_matcha_voice.sh
set -eo pipefail
# shellcheck source=common/env.sh
. "$(dirname "$0")/common/env.sh"

usual=full # the size with one of the next flags, which bring a model or data; else it is demo
brings='--model_file --train_manifest --init_from'
always='--output_dir runs/matcha_voice' # a folder of its own for each recipe

# R: --gradient_checkpointing
rows='
#tier size  batch accumulation what
*     demo  16 1
4gb   full  8 4
4gb   large 8 4 R
6gb   full  16 2
6gb   large 8 4
8gb   full  32 1
8gb   large 16 2
t4    full  32 1
t4    large 32 1
16gb  full  32 1
16gb  large 32 1
24gb  full  32 1
24gb  large 32 1
a100  full  32 1
a100  large 32 1
cpu   *     4 8 R
'
# What is added, as common/preset.py describes it. `new`: a model from scratch. SIZE is the size.
adds='
new unless --model_file --init_from: --model_size SIZE
'
run matcha_voice "$@"
