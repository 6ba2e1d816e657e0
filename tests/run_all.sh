#!/usr/bin/env bash
# Runs all tests, with real Megatron-core and DeepSpeed on the CPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tests/setup_frameworks.sh
# Two workers, one thread each: the tests are many small ones, and torch would otherwise start a thread per core.
export OMP_NUM_THREADS=1
# Containers often forbid Python to keep what it compiles; nearly every test of a framework starts processes, each of
# which would compile all of torch that it imports, which takes twice as long as importing it.
unset PYTHONDONTWRITEBYTECODE
# Files in the order of conftest.py: by itself xdist takes those with the fewest tests last, which are the longest.
exec "${MIST_TEST_VENV:-.venv-test}/bin/python" -m pytest -n "${MIST_TEST_WORKERS:-2}" --dist loadfile \
  --no-loadscope-reorder --durations=20 "$@"
