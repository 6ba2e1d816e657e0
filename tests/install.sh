# shellcheck shell=bash
# Sourced by what makes an environment of the tests.

# A download that breaks off half-way ends pip with a traceback: twice more, then it is told.
again() {
  local tries
  for tries in 1 2; do
    "$@" && return
    echo "failed, trying again ($tries of 2): ${*:1:4} ..." >&2
    sleep 5
  done
  "$@"
}

# What pip is told on this machine about indexes and certificates, in the words of uv.
settings_of_pip() {
  "$1" -m pip config list | "$1" -c '
import ast, shlex, sys

lines = [line.rstrip().split("=", 1) for line in sys.stdin]
lines.sort(key=lambda line: line[0].startswith(":env:"))  # which goes before files
said = {name.split(".")[-1]: ast.literal_eval(value).split() for name, value in lines}
words = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
         "constraint": "UV_CONSTRAINT", "cert": "SSL_CERT_FILE", "default-timeout": "UV_HTTP_TIMEOUT"}
for name in words.keys() & said.keys():
    together = ("," if name == "find-links" else " ").join(said[name])
    print("export", words[name] + "=" + shlex.quote(together))
'
  echo export UV_INDEX_STRATEGY=unsafe-best-match # as pip: the newest of all indexes
}

# Nothing is compiled to .pyc: Python does that with what is imported, a small part of all this.
by_pip() {
  local python=$1
  shift
  again "$python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

# install PYTHON WHAT ...: into that Python's environment, by uv, which takes a quarter of pip's time, or else by pip.
install() {
  local python=$1
  shift
  if "$python" -m uv --version >/dev/null 2>&1 || by_pip "$python" --only-binary :all: uv; then
    (eval "$(settings_of_pip "$python")" && "$python" -m uv pip install --quiet --python "$python" "$@") && return
  fi
  echo "by pip, which takes longer: $*" >&2
  by_pip "$python" "$@"
}
