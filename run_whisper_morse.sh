#!/bin/sh
# shellcheck shell=bash
# Trains Whisper on Morse code with a preset for the GPU's memory. Without any argument it trains on synthetic clips.
#   ./run_whisper_morse.sh [TIER] [SIZE] [any flag of recipes/whisper_morse.py] [--print]
#   GPUS=2 ./run_whisper_morse.sh ...    trains on two GPUs, with the same update
# TIER: auto (default), 4gb, 6gb, 8gb, 16gb, 24gb, 32gb, cpu. SIZE: demo (default without any of the flags that follow), small
# (default with --model_dir, --model_file, --data_dir, --train_manifest, --conditions or --from_scratch), tiny, base, medium,
# large, turbo; many: small for very large data sets. A model from scratch has this size. A model from --model_dir or
# --model_file has its own size, and SIZE only picks the row of the table.
# An update is 96 clips in every tier (many: 256, demo: 24); the tier decides how many of them are on the GPU at once.
# --print shows the command instead of running it; python recipes/whisper_morse.py --help lists the flags.
# The output is written in runs/whisper_morse, unless --output_dir names another folder.
[ -n "${BASH_VERSION:-}" ] || exec /bin/bash -p -- "$0" "$@" # not by PATH, without BASH_ENV: see common/env.sh
set -euo pipefail
script=$(PATH=/usr/bin:/bin:$PATH readlink -f -- "${BASH_SOURCE[0]}")
# shellcheck source=common/env.sh
. "${script%/*}/common/env.sh"

# R: --gradient_checkpointing, F: --freeze_encoder, 8: --optimizer adamw_8bit, H: --use_cpu_offload. Larger GPUs need the
# clips of several data workers.
rows='
#tier size   batch accumulation what, or flags
*     demo   24 1
4gb   tiny   12 8
4gb   base   4 24
4gb   small  2 48 R H
4gb   many   2 128 R H
4gb   *      ! small, base or tiny
6gb   tiny   24 4
6gb   base   12 8
6gb   small  8 12 R 8
6gb   many   8 32 R 8
6gb   *      ! small, base or tiny
8gb   tiny   32 3
8gb   base   16 6
8gb   small  16 6 R
8gb   many   16 16 R
8gb   medium 24 4 R F H
8gb   large  ! turbo, medium or small
8gb   turbo  8 12 F
16gb  many   64 4 R --dataloader_num_workers 8
16gb  *      + --dataloader_num_workers 6
16gb  tiny   48 2
16gb  base   48 2
16gb  small  12 8
16gb  medium 16 6 R 8
16gb  large  16 6 R F 8
16gb  turbo  12 8 R 8
24gb  many   64 4 R --dataloader_num_workers 8
24gb  *      + --dataloader_num_workers 6
24gb  tiny   96 1
24gb  base   48 2
24gb  small  24 4
24gb  medium 24 4 R
24gb  large  8 12 R 8
24gb  turbo  16 6 R
32gb  many   64 4 R --dataloader_num_workers 8
32gb  *      + --dataloader_num_workers 6
32gb  tiny   96 1
32gb  base   48 2
32gb  small  48 2 R
32gb  medium 32 3 R
32gb  large  16 6 R 8
32gb  turbo  32 3 R
cpu   tiny   12 8
cpu   base   12 8
cpu   small  4 24
cpu   many   4 64
cpu   *      2 48 R
'
tier_and_size "$@"; shift "$words"
flags+=(--output_dir runs/whisper_morse) # the current folder may have another recipe's checkpoints
trains "$@" || run whisper_morse "$@"
row_or_demo small '--model_dir --model_file --data_dir --train_manifest --conditions --from_scratch' "$@"
pick_row "$tier" "$row" "$@"
if is_new_model "$row" "$@"; then
  name=${row/#large/large-v3}
  flags+=(--from_scratch --model_size "${name/#many/small}")
fi
resume_unless_given "$@"
run whisper_morse "$@"
