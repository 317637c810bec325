#!/usr/bin/env bash
# Makes .venv in the checkout ready for `make demo` and `make test`: system packages, torch,
# DeepSpeed, this package, and DeepSpeed's operators compiled. Quick when there is nothing to do.
# With the argument "compiler" the system packages alone.
#
# Variables: PYTHON (default python3), TORCH_SPEC (what to install as torch, default below;
# for a machine without CUDA add "--index-url https://download.pytorch.org/whl/cpu" to PIP_ARGS if
# your package index serves the larger CUDA build under the same name), MAX_JOBS (compilers at once).
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_SPEC="${TORCH_SPEC:-torch==2.13.0}"
PYTHON="${PYTHON:-python3}"
VENV=.venv
REQUIREMENTS=scripts/requirements-dev.txt
SYSTEM_PACKAGES=(g++ libaio-dev make python3-dev python3-venv)

say() { printf '== %s\n' "$*"; }

# What the environment was made from; another answer means it has to be looked at again.
fingerprint() {
  { echo "$TORCH_SPEC"; cat "$REQUIREMENTS" pyproject.toml setup.py; } | sha256sum | cut -d' ' -f1
}

# torch passes the linker its own path without quotes, so that no operator could be built from here.
refuse_spaces() {
  case "$PWD" in
    *[[:space:]]*)
      echo "cannot prepare an environment in a path with a space: $PWD" >&2
      echo "likely cause: torch's extension builder (for DeepSpeed's operators) cannot link from it" >&2
      echo "fix: move this checkout to a path without spaces" >&2
      exit 1
      ;;
  esac
}

install_system_packages() {
  command -v dpkg-query > /dev/null || return 0
  local missing=()
  for package in "${SYSTEM_PACKAGES[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q 'ok installed' ||
      missing+=("$package")
  done
  # A python of one's own brings its headers and venv with it.
  if "$PYTHON" -c 'import ensurepip, sysconfig, os, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2> /dev/null
  then
    missing=("${missing[@]/python3-dev/}")
    missing=("${missing[@]/python3-venv/}")
  fi
  # shellcheck disable=SC2206  # drops the emptied elements
  missing=(${missing[@]})
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ "$(id -u)" -ne 0 ]; then
    echo "cannot install system packages as user $(id -un): ${missing[*]} missing" >&2
    echo "fix: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  say "installing system packages: ${missing[*]}"
  # Another target of make may be at it: its lock is waited for.
  apt-get update -qq -o DPkg::Lock::Timeout=300
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o DPkg::Lock::Timeout=300 "${missing[@]}"
}

# shellcheck disable=SC2086  # PIP_ARGS is a list of words
pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check ${PIP_ARGS:-} "$@"; }

make_virtual_environment() {
  if [ ! -x "$VENV/bin/python" ]; then
    say "creating the virtual environment $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV"
  fi
  # Of what the core is built with; a later step must not exchange it beside the compiler.
  pip_install --quiet "setuptools>=77" wheel ninja "pybind11>=3.0,<4"
}

install_python_packages() {
  say "installing $TORCH_SPEC (some 200 MB for CPU, some GB for CUDA)"
  pip_install --progress-bar on "$TORCH_SPEC"
  say "installing DeepSpeed, transformers and the tools"
  # DeepSpeed's source package imports torch while it is built.
  DS_BUILD_OPS=0 pip_install --quiet --no-build-isolation -r "$REQUIREMENTS"
}

# "#!" takes no path with a space. pip knows it for all scripts but a package's own, such as
# `deepspeed`; the Makefile has these find the interpreter.
mend_scripts() {
  case "$PWD" in *" "*) ;; *) return 0 ;; esac
  local script
  for script in "$VENV"/bin/*; do
    [ -f "$script" ] && [ ! -L "$script" ] || continue
    if [ "$(head -c 2 "$script" | tr -d '\0')" = "#!" ]; then
      sed -i "1s|^#!$PWD/$VENV/bin/python.*|#!/usr/bin/env python|" "$script"
    fi
  done
}

install_memascend() {
  say "building memascend (a minute or two)"
  "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet \
    --no-build-isolation --no-deps --editable .
}

build_core_if_changed() {
  local core
  core="$(compgen -G 'memascend/_core*.so' | head -n 1 || true)"
  if [ -z "$core" ] || [ -n "$(find csrc setup.py -newer "$core" -print -quit)" ]; then
    say "building the native core, its sources changed"
    "$VENV/bin/python" setup.py -q build_ext --inplace --force
  fi
}

compile_operators() {
  say "compiling DeepSpeed's operators (minutes the first time)"
  "$VENV/bin/python" scripts/compile_operators.py
}

# The same as in the Makefile, for whoever runs this script by itself.
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/$VENV/torch_extensions}"
nvidia-smi -L > /dev/null 2>&1 || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"

if [ "${1:-}" = compiler ]; then
  install_system_packages
  exit
fi
# A link to an environment shared between checkouts is its owner's to keep.
if [ ! -L "$VENV" ]; then
  refuse_spaces
  stamp="$VENV/.ready"
  wanted="$(fingerprint)"
  if [ "$(cat "$stamp" 2> /dev/null || true)" != "$wanted" ]; then
    install_system_packages
    make_virtual_environment
    install_python_packages
    install_memascend
    mend_scripts
    compile_operators
    echo "$wanted" > "$stamp"
  fi
fi
build_core_if_changed
