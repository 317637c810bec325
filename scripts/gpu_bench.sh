#!/usr/bin/env bash
# Measures training on a machine with CUDA GPUs: memory, tokens per second, what the device waits
# for. Arguments go to benchmarks/bench_gpu.py (--help), names of cases among them.
# Ends with status 75 when there is more to do (start it again), else with 0 when all is done and 1
# when a run failed; 77 without a CUDA device. Needs what gpu_smoke.sh needs; stock's rows need the
# CUDA toolkit and libaio's headers as well.
set -euo pipefail
exec "$(dirname "$0")/with_core.sh" benchmarks/bench_gpu.py "$@"
