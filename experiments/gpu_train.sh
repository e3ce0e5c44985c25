#!/usr/bin/env bash
# Data and training on a GPU in one command, resumable: the same command goes on where it was stopped.
#
#   experiments/gpu_train.sh [TARGET] [TOKENS] [OUTPUT]
#
# TARGET  as in target=... (smollm2-135m). TOKENS  answer tokens to distil (4000000).
# OUTPUT  where checkpoints, cards and curves go (outputs/trained/TARGET).
# PYTHON, BATCH (prompts decoded together), STEPS, LAYERS (of the small model) and OPTIONS (more options of run.py,
# e.g. "target.path=/models/llama3-8b") come from the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:-smollm2-135m}
tokens=${2:-4000000}
output=${3:-outputs/trained/$target}
python=${PYTHON:-python}
read -ra options <<<"${OPTIONS:-}"
data=("task.data.tokens=$tokens" "task.data.batch_size=${BATCH:-512}" task.data.round=4)
train=(task=train "target=$target" "${data[@]}" "task.steps=${STEPS:-6000}" task.batch_positions=16384
       task.micro_positions=8192 task.validate_every=500)

say() { printf '\n== %s\n' "$*"; }

run() { # name, options: a finished run is not repeated, an interrupted one goes on
    local name=$1
    shift
    say "$name"
    "$python" run.py "$@" "${options[@]}" resume=true "hydra.run.dir=$output/runs/$name"
}

run eagle "${train[@]}" drafter=eagle drafter.depth=3 "task.output=$output/eagle"  # first: all need its states
run medusa "${train[@]}" drafter=medusa "task.output=$output/medusa"
run small "${train[@]}" drafter=small "drafter.layers=${LAYERS:-4}" "task.compare=[2,3,4,6]" "task.output=$output/small"

say "what they are worth"
run measure-eagle "target=$target" drafter=eagle "drafter.checkpoint=$output/eagle"
run measure-medusa "target=$target" drafter=medusa "drafter.checkpoint=$output/medusa"
run measure-small "target=$target" drafter=small "drafter.path=$output/small"
