#!/usr/bin/env bash
# Makes one folder with all that a machine with a GPU and no network needs to run the checks and the
# bench: gpu_bundle.sh --python 3.12 [--out build/gpu-bundle]. See gpu_bundle.py --help.
# Needs a package index, git, and an environment with torch, in which DeepSpeed's package is made.
#
# Variables: PYTHON (default: the checkout's environment where there is one, else python3).
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x "$root/.venv/bin/python" ] && PYTHON="$root/.venv/bin/python"
fi
exec "$PYTHON" "$root/scripts/gpu_bundle.py" "$@"
