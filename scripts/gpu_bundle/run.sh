#!/usr/bin/env bash
# Runs the checks or the bench of this bundle on a machine without network; README.md says how.
#   run.sh smoke ARGUMENT...     checks/scripts/gpu_smoke.py
#   run.sh bench ARGUMENT...     checks/benchmarks/bench_gpu.py
# Its own packages and results are in WORK (default: work/ beside this file); the first call
# installs. Variables: PYTHON (default python3), WORK, CUDA_HOME.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
work="${WORK:-$here/work}"
python="${PYTHON:-python3}"

case "${1:-}" in
  smoke) program="$here/checks/scripts/gpu_smoke.py" ;;
  bench) program="$here/checks/benchmarks/bench_gpu.py" ;;
  *) sed -n '2,6s/^# \?//p' "$0" >&2; exit 2 ;;
esac
what="$1"
shift

mkdir -p "$work"
"$python" "$here/install.py" "$work/site"
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$work/site/bin:$PATH"  # ninja
export TORCH_EXTENSIONS_DIR="$work/torch_extensions" TRITON_CACHE_DIR="$work/triton"
export NCCL_SOCKET_IFNAME=lo PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
unset DS_ACCELERATOR TRITON_INTERPRET
# Stock's async_io is linked with libcuda, of which images without a driver have a stub.
stubs="${CUDA_HOME:-/usr/local/cuda}/lib64/stubs"
if [ -d "$stubs" ]; then
  export LIBRARY_PATH="$stubs${LIBRARY_PATH:+:$LIBRARY_PATH}"
fi

exec "$python" "$program" --spent "$SECONDS" --nvme-path "$work" \
  --out "$work/$what" --results "$work/$what.json" "$@"
