#!/usr/bin/env bash
# Makes the tests' virtual environment: this package, and Megatron-core and DeepSpeed on the CPU.
# Needs Python 3.11, 3.12 or 3.13 and internet; run it again at will, it does nothing when nothing changed.
#
#   MIST_TEST_VENV     folder of the environment (default: .venv-test)
#   MIST_TORCH_INDEX   extra package index with CPU wheels of PyTorch, as named on its "Get Started" page;
#                      without it Linux may download the CUDA wheels, which work as well but are 2 GB
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${MIST_TEST_VENV:-.venv-test}
pins=tests/requirements-frameworks.txt

find_python() {
  # 3.12 first: the newest that all three frameworks ship wheels for.
  local name
  for name in ${PYTHON:-} python3.12 python3.13 python3.11 python3 python; do
    if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "error: no Python 3.11, 3.12 or 3.13 found; name one with PYTHON=/path/to/python" >&2
  return 2
}

fingerprint() { cat pyproject.toml "$pins" tests/setup_frameworks.sh | cksum; }

if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/mist-ready" 2>/dev/null)" = "$(fingerprint)" ]; then
  exit 0
fi

python=$(find_python)
"$python" -m venv "$venv" || {
  echo "error: $python cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)" >&2
  exit 2
}
python=$venv/bin/python
rm -f "$venv/mist-ready"

install() { "$python" -m pip install --quiet --disable-pip-version-check --constraint "$pins" "$@"; }

# torch goes first and alone: DeepSpeed's build reads its version.
install ${MIST_TORCH_INDEX:+--extra-index-url "$MIST_TORCH_INDEX"} torch
install --editable '.[test]' setuptools wheel pybind11 packaging ninja
DS_BUILD_OPS=0 install deepspeed # no CUDA here: kernels are not compiled
install transformers accelerate
from_source=()
if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
  # Megatron-core declares Python 3.12; its source runs on 3.11 and compiles one small extension.
  command -v c++ >/dev/null || command -v g++ >/dev/null || {
    echo "error: Megatron-core on Python 3.11 needs a C++ compiler; install g++, or use Python 3.12" >&2
    exit 2
  }
  from_source=(--ignore-requires-python --no-build-isolation --no-binary megatron-core)
fi
install --no-deps ${from_source[@]+"${from_source[@]}"} megatron-core
# The oldest version that the patches support, in a folder that its tests put first on the path. The
# constraints name the newest one, so they are left out.
rm -rf "$venv/megatron-0.16.1"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps ${from_source[@]+"${from_source[@]}"} \
  --target "$venv/megatron-0.16.1" megatron-core==0.16.1
fingerprint >"$venv/mist-ready"
