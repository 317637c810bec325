#!/usr/bin/env bash
# Runs a Python program of this checkout: with_core.sh PROGRAM ARGUMENT... The core is built first
# where it is missing. Paths in the arguments are relative to the checkout.
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
exec "$PYTHON" "$@"
