#!/usr/bin/env bash
# Measures training on a machine with CUDA GPUs: memory, tokens per second, what the device waits
# for. Arguments go to benchmarks/bench_gpu.py (--help), names of cases among them.
# Ends with status 0 when all is done, 1 when a run failed, 75 when there is more to do (start it
# again), 77 when there is no CUDA device. Needs what gpu_smoke.sh needs.
set -euo pipefail
exec "$(dirname "$0")/with_core.sh" benchmarks/bench_gpu.py "$@"
