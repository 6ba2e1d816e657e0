#!/usr/bin/env bash
# Runs tests of what dependencies are used for with the lowest version of each that pyproject.toml allows.
# Needs Python 3.11 or 3.12 and internet; takes a minute or two. Arguments go to pytest.
#
#   MIST_LOWEST_VENV   folder of the environment (default: .venv-lowest)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/install.sh

venv=${MIST_LOWEST_VENV:-.venv-lowest}
python=${PYTHON:-python3}
pins=$("$python" - <<'PINS'
import re
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = project["dependencies"] + extras["milp"] + extras["plot"] + [need for need in extras["test"] if re.match("pytest|hypothesis|msgspec|jsonschema", need)]
print(" ".join(re.sub(r">=([0-9.]+).*", r"==\1", need) for need in wanted))
PINS
)
if [ "$(cat "$venv/mist-ready" 2>/dev/null)" != "$pins" ]; then
  "$python" -m venv --clear "$venv"
  # shellcheck disable=SC2086  # one word each
  install "$venv/bin/python" $pins
  install "$venv/bin/python" --no-deps --no-build-isolation hatchling \
    editables pathspec pluggy trove-classifiers packaging
  install "$venv/bin/python" --no-deps --no-build-isolation --editable .
  echo "$pins" >"$venv/mist-ready"
fi
chosen=("$@")
if [ "$#" -eq 0 ]; then
  chosen=(tests/spec tests/ask/test_api.py tests/cli/test_output.py tests/cli/test_narrow_terminals.py
    tests/cli/test_reference.py tests/cli/test_options.py tests/search/test_assign.py tests/calibrate/test_profile_file.py)
fi
# Old libraries call what newer ones below them deprecate; that is no fault of ours.
OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -q -n "${MIST_TEST_WORKERS:-2}" -W ignore::DeprecationWarning "${chosen[@]}"
