"""Offline stand-ins for the programs with which tests fetch their tools: first on PATH, they let unmodified ``test.sh``
run without network. Pure: texts.

A stand-in does nothing where what is asked for is there, and fails with a sentence where it is not: it never pretends
that something was installed. ``apt-get`` and ``apt`` look for programs and packages of the base, ``curl`` and ``wget``
answer only uv's installer, ``uv`` and ``uvx`` run programs and modules of the environment's Python, ``pip`` looks for
its modules.
"""

FOLDER = "shims"
"""Where they are, below the folder that holds what is ours in an environment."""

_APT = r"""#!/bin/sh
# apt-get without a network: what is there counts as installed.
verb=; missing=
for word in "$@"; do
  case "$word" in
    -*) continue ;;
  esac
  if [ -z "$verb" ]; then verb=$word; continue; fi
  [ "$verb" = install ] || continue
  name=${word%%=*}; name=${name%%:*}
  case "$name" in
    ca-certificates|build-essential|locales|tzdata|apt-transport-https|software-properties-common) continue ;;
  esac
  program=$name
  case "$name" in
    python3-pip) program=pip3 ;;
    python3-venv|python3-dev|python-is-python3) program=python3 ;;
    coreutils) program=ls ;;
    procps) program=ps ;;
    util-linux) program=mount ;;
    netcat|netcat-openbsd) program=nc ;;
  esac
  command -v "$program" >/dev/null 2>&1 && continue
  if command -v dpkg-query >/dev/null 2>&1 && dpkg-query -W "$name" >/dev/null 2>&1; then continue; fi
  missing="$missing $name"
done
if [ -n "$missing" ]; then
  echo "apt-get: there is no network here, and these are not there:$missing" >&2
  exit 100
fi
exit 0
"""

_CURL = r"""#!/bin/sh
# curl and wget without a network: uv's installer is answered, everything else fails as without a route.
for word in "$@"; do
  case "$word" in
    *astral.sh/uv*|*github.com/astral-sh/uv/*installer*)
      echo 'mkdir -p "$HOME/.local/bin" && : > "$HOME/.local/bin/env"'
      exit 0 ;;
    --version|-V) echo "offline stand-in for $(basename "$0")"; exit 0 ;;
  esac
done
# Of this machine itself: the real program, where there is one.
for word in "$@"; do
  case "$word" in
    http://localhost*|http://127.0.0.1*|localhost:*|127.0.0.1:*)
      name=$(basename "$0"); here=$(dirname "$0")
      PATH=$(printf %s "$PATH" | tr : '\n' | grep -vx "$here" | paste -sd : -)
      export PATH
      command -v "$name" >/dev/null 2>&1 && exec "$name" "$@" ;;
  esac
done
echo "$(basename "$0"): there is no network here" >&2
exit 6
"""

_UVX = r"""#!/bin/sh
# uvx without a network: the program, or the module of that name, of the environment.
with=; python=$PYTHON_FOR_TESTS
[ -n "$python" ] || python=python3
while [ $# -gt 0 ]; do
  case "$1" in
    --with|-w) with="$with $2"; shift 2 ;;
    --with=*) with="$with ${1#--with=}"; shift ;;
    -p|--python|--from|--index-url|--with-requirements) shift 2 ;;
    --) shift; break ;;
    -*) shift ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || { echo "uvx: there is no program named" >&2; exit 2; }
name=${1%%[=@<>]*}; shift
for requirement in $with $name; do
  module=$(printf %s "${requirement%%[=<>!~[]*}" | tr 'A-Z.-' 'a-z__')
  case "$module" in
    pytest_json_ctrf) module=pytest_json_ctrf ;;
    pyyaml) module=yaml ;;
    beautifulsoup4) module=bs4 ;;
    scikit_learn) module=sklearn ;;
    pillow) module=PIL ;;
    opencv_python|opencv_python_headless) module=cv2 ;;
  esac
  "$python" - "$module" 2>/dev/null <<'END' && continue
import importlib.util, sys
sys.exit(importlib.util.find_spec(sys.argv[1]) is None)
END
  command -v "$requirement" >/dev/null 2>&1 && continue
  echo "uvx: there is no network here, and $requirement is not there" >&2
  exit 2
done
module=$(printf %s "$name" | tr 'A-Z-' 'a-z_')
if "$python" -c "import $module" >/dev/null 2>&1; then exec "$python" -m "$module" "$@"; fi
exec "$name" "$@"
"""

_UV = r"""#!/bin/sh
# uv without a network: `uv run` and `uv tool run` as uvx, `uv pip` as pip; what makes environments does nothing.
here=$(dirname "$0")
verb=${1:-}; [ $# -gt 0 ] && shift
case "$verb" in
  --version|version) echo "uv (offline stand-in)" ;;
  pip) exec "$here/pip" "$@" ;;
  tool) [ "${1:-}" = run ] && shift; exec "$here/uvx" "$@" ;;
  run)
    while [ $# -gt 0 ]; do
      case "$1" in
        --with|-w|-p|--python|--project|--directory|--extra|--group) shift 2 ;;
        --) shift; break ;;
        -*) shift ;;
        *) break ;;
      esac
    done
    case "${1:-}" in
      *.py) exec python3 "$@" ;;
      python|python3) shift; exec python3 "$@" ;;
    esac
    command -v "${1:-}" >/dev/null 2>&1 && exec "$@"
    exec "$here/uvx" "$@" ;;
  init|venv|sync|lock|python|cache|self) exit 0 ;;
  add) exec "$here/pip" install "$@" ;;
  *) echo "uv: '$verb' is not known to the offline stand-in" >&2; exit 2 ;;
esac
"""

_PIP = r"""#!/bin/sh
# pip without a network: `install` looks whether everything is there; anything else goes to the real one.
if [ "${1:-}" != install ]; then exec python3 -m pip "$@"; fi
shift
while [ $# -gt 0 ]; do
  case "$1" in
    -r|--requirement|-c|--constraint|-i|--index-url|--extra-index-url|-t|--target|--find-links|-f) shift 2; continue ;;
    -*) shift; continue ;;
    pip|pip=*|pip\>*|setuptools*|wheel|wheel=*|uv|uv=*) shift; continue ;;
    .|./*|/*) echo "pip: there is no network here; a folder cannot be installed" >&2; exit 1 ;;
  esac
  python3 - "$1" <<'END' || { echo "pip: there is no network here, and $1 is not there" >&2; exit 1; }
import importlib.metadata, importlib.util, re, sys
name = re.split(r"[=<>!~\[;@ ]", sys.argv[1])[0]
try:
    importlib.metadata.version(name)
except importlib.metadata.PackageNotFoundError:
    sys.exit(importlib.util.find_spec(name.lower().replace("-", "_")) is None)
END
  shift
done
exit 0
"""

SHIMS = {
    "apt-get": _APT, "apt": _APT, "curl": _CURL, "wget": _CURL, "uv": _UV, "uvx": _UVX, "pip": _PIP, "pip3": _PIP,
}  # fmt: skip
"""Name -> text of an executable file."""
