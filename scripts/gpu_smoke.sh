#!/usr/bin/env bash
# Checks memascend on a machine with CUDA GPUs; each check has a control that must fail.
# Needs python3 with a CUDA torch, deepspeed and transformers, a C++ compiler, and what DeepSpeed
# needs to compile its Adam on the CPU (the CUDA toolkit). Arguments go to gpu_smoke.py (--help),
# names of checks among them. Ends with status 0 when every check passed that this machine can run,
# 1 when one failed, 75 when there is more to do (start it again), 77 without a CUDA device.
set -euo pipefail
exec "$(dirname "$0")/with_core.sh" scripts/gpu_smoke.py "$@"
