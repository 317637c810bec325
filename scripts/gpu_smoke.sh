#!/usr/bin/env bash
# Checks memascend on a machine with a CUDA GPU: parity, pinned memory, event order, bandwidth.
# Needs python3 with a CUDA torch, deepspeed and transformers, a C++ compiler, and what DeepSpeed
# needs to compile its Adam on the CPU (the CUDA toolkit). Ends with status 0 when every check
# passed, 1 when one failed, 77 when there is no CUDA device. Arguments go to gpu_smoke.py.
#
# Variables: PYTHON (default: the checkout's environment where there is one, else python3).
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON="$PWD/.venv/bin/python"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if ! "$PYTHON" -c 'import memascend._core' 2> /dev/null; then
  echo "== building the native core"
  "$PYTHON" setup.py -q build_ext --inplace
fi
exec "$PYTHON" scripts/gpu_smoke.py "$@"
