#!/usr/bin/env bash
# Makes the tests' virtual environment: this package, and Megatron-core and DeepSpeed on the CPU.
# Needs Python 3.11, 3.12 or 3.13 and internet; run it again at will, it does nothing when nothing changed.
#
#   MIST_TEST_VENV     folder of the environment (default: .venv-test)
#   MIST_TEST_EXTRA    extra of this package that is installed along: test (default), or dev with lint and types
#   MIST_TORCH_INDEX   extra package index with CPU wheels of PyTorch, as named on its "Get Started" page;
#                      without it Linux may download the CUDA wheels, which work as well but are 2 GB
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/install.sh

venv=${MIST_TEST_VENV:-.venv-test}
extra=${MIST_TEST_EXTRA:-test}
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

fingerprint() { (cat pyproject.toml "$pins" tests/setup_frameworks.sh tests/install.sh && echo "$extra") | cksum; }

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

build_tools=(setuptools wheel pybind11 packaging ninja)
install "$python" "${build_tools[@]}"
anyway=() from_source=()
if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
  # Megatron-core declares Python 3.12; its source runs on 3.11 and compiles one small extension.
  command -v c++ >/dev/null || command -v g++ >/dev/null || {
    echo "error: Megatron-core on Python 3.11 needs a C++ compiler; install g++, or use Python 3.12" >&2
    exit 2
  }
  anyway=(--ignore-requires-python)
  from_source=(--no-build-isolation --no-binary megatron-core)
fi
# The newest Megatron-core, and the older ones that the patches support. All are built while all else is
# installed, in an environment of their own: a build that imports what another pip is just writing fails.
# `pip wheel` itself cannot look for what declares another Python.
older_megatrons=(0.16.1 0.18.0)
megatron=$(mktemp -d)
trap 'rm -rf "$megatron"' EXIT
build_megatron() {
  local newest version pip
  "$python" -m venv "$megatron/tools"
  PATH=$megatron/tools/bin:$PATH # Megatron-core's build asks `python3` for pybind11
  pip=(again "$megatron/tools/bin/python" -m pip --quiet --disable-pip-version-check)
  "${pip[@]}" install "${build_tools[@]}"
  newest=$(sed -n 's/^megatron-core==//p' "$pins")
  for version in "$newest" "${older_megatrons[@]}"; do
    # The extension reads data sets, which one Megatron is tried with: a build goes on where no compiler is found.
    [ "$version" = "$newest" ] || export CC=false CXX=false
    "${pip[@]}" download --no-deps ${anyway[@]+"${anyway[@]}"} ${from_source[@]+"${from_source[@]}"} \
      --dest "$megatron/$version" "megatron-core==$version"
    "${pip[@]}" wheel --no-deps ${anyway[@]+"${anyway[@]}"} --no-build-isolation \
      --wheel-dir "$megatron/wheels" "$megatron/$version"/*
  done
}
build_megatron &
building=$!

# torch goes first: DeepSpeed's build reads its version.
install "$python" --constraint "$pins" ${MIST_TORCH_INDEX:+--extra-index-url "$MIST_TORCH_INDEX"} --editable ".[$extra]" torch
# No CUDA here: kernels are not compiled.
DS_BUILD_OPS=0 UV_NO_BUILD_ISOLATION=1 install "$python" --constraint "$pins" deepspeed transformers accelerate peft
wait "$building"
# The older ones that the patches support, in folders that their tests put first on the path.
rm -rf "$venv"/megatron-0.* "$venv/deepspeed-0.19.0"
for version in "${older_megatrons[@]}"; do
  by_pip "$python" --no-deps ${anyway[@]+"${anyway[@]}"} --target "$venv/megatron-$version" "$megatron"/wheels/*-"$version"-*
  rm "$megatron"/wheels/*-"$version"-*
done
DS_BUILD_OPS=0 by_pip "$python" --no-deps --no-build-isolation --target "$venv/deepspeed-0.19.0" deepspeed==0.19.0
by_pip "$python" --no-deps ${anyway[@]+"${anyway[@]}"} "$megatron"/wheels/*
fingerprint >"$venv/mist-ready"
