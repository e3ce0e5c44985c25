#!/usr/bin/env bash
# What a GPU must show, in one command and under eight minutes; nothing is downloaded.
#
#   experiments/gpu_check.sh [OPTIONS of run.py]
#   experiments/gpu_check.sh target=tiny target.device=cpu target.dtype=float32 ...   # the same without a GPU
#
# PYTHON  the interpreter (python3). WHEELS  a folder of wheels that it lacks; they are unpacked to a folder that
# is removed at the end. Results: gpu_check.md and summary.json in the run's directory (hydra.run.dir=...).
set -euo pipefail
python=$(realpath -s "$(command -v "${PYTHON:-python3}" || echo "${PYTHON:-python3}")")
WHEELS=${WHEELS:+$(realpath "$WHEELS")}
cd "$(dirname "$0")/.."
"$python" -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 12) else "Python 3.11 or 3.12 is needed; set PYTHON")'

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
if [[ -n ${WHEELS:-} ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" run.py task=gpu_check "$@"
