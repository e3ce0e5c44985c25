#!/usr/bin/env bash
# Data and training on a GPU in one command, resumable: the same command goes on where it was stopped.
#
#   experiments/gpu_train.sh [TARGET] [TOKENS] [OUTPUT]
#
# TARGET  as in target=... (smollm2-135m). TOKENS  answer tokens to distil (4000000).
# OUTPUT  where checkpoints, cards and curves go (outputs/trained/TARGET).
# From the environment: PYTHON, the interpreter (python3), and more options of run.py, which win over those below:
# OPTIONS of all runs, e.g. "target.path=/models/llama3-8b"; TRAIN of all trainings, e.g. "task.steps=2000
# task.data.batch_size=128"; SMALL of the small model's, e.g. "drafter.layers=6"; MEASURE of the measurements.
set -euo pipefail
python=$(realpath -s "$(command -v "${PYTHON:-python3}" || echo "${PYTHON:-python3}")")
cd "$(dirname "$0")/.."
"$python" -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 12) else "Python 3.11 or 3.12 is needed; set PYTHON")'

target=${1:-smollm2-135m}
tokens=${2:-4000000}
output=${3:-outputs/trained/$target}
read -ra options <<<"${OPTIONS:-}"
read -ra train <<<"${TRAIN:-}"
read -ra small <<<"${SMALL:-}"
read -ra measure <<<"${MEASURE:-}"
train=("task.data.tokens=$tokens" task.data.batch_size=512 task.data.round=4 task.steps=6000
       task.batch_positions=16384 task.micro_positions=8192 task.validate_every=500 "${train[@]}")
small=(drafter.layers=4 "task.compare=[2,3,4,6]" "${small[@]}")

run() { # name, options: a finished run is not repeated, an interrupted one goes on
    local name=$1
    shift
    printf '\n== %s\n' "$name"
    "$python" run.py "target=$target" "$@" "${options[@]}" resume=true "hydra.run.dir=$output/runs/$name"
}

# EAGLE first: its hidden states are all that the others need
run eagle task=train drafter=eagle drafter.depth=3 "${train[@]}" "task.output=$output/eagle"
run medusa task=train drafter=medusa "${train[@]}" "task.output=$output/medusa"
run small task=train drafter=small "${train[@]}" "${small[@]}" "task.output=$output/small"

# what they are worth
run measure-eagle drafter=eagle "drafter.checkpoint=$output/eagle" "${measure[@]}"
run measure-medusa drafter=medusa "drafter.checkpoint=$output/medusa" "${measure[@]}"
run measure-small drafter=small "drafter.path=$output/small" "${measure[@]}"
