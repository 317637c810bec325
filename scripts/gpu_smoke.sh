#!/usr/bin/env bash
# Checks memascend on a machine with CUDA GPUs; each check has a control that must fail.
# Needs python3 with a CUDA torch, deepspeed, transformers and accelerate, and a C++ compiler with
# Python's headers; no CUDA toolkit. Arguments go to gpu_smoke.py (--help), names of checks among
# them. Ends with status 75 when there is more to do (start it again), else with 0 when every check
# passed that this machine can run and 1 when one failed; 77 without a CUDA device.
# On a machine without network: gpu_bundle.sh.
set -euo pipefail
exec "$(dirname "$0")/with_core.sh" scripts/gpu_smoke.py "$@"
