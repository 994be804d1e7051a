"""Offline stand-ins for the programs with which tests fetch their tools: first on PATH, they let unmodified ``test.sh``
run without network. Pure: texts.

A stand-in does nothing where what is asked for is there, and fails with a sentence where it is not: it never pretends
that something was installed. ``apt-get`` and ``apt`` look for programs and packages of the base, ``curl`` and ``wget``
answer only uv's installer, ``uv`` and ``uvx`` run programs and modules of the environment's Python, ``pip`` looks for
its modules, ``pytest`` is the environment's or runs the module. Where ``GYRE_TOOLS`` names a folder of Python modules,
these count as the environment's, after its own: `SITE` on PYTHONPATH puts them at the end of every Python's path.
"""

FOLDER = "shims"
"""Where they are, below the folder that holds what is ours in an environment."""
SITE_FOLDER = "site"
"""Beside it: what every Python of a program of the task reads first."""
SITE = {
    "sitecustomize.py": """\
# What the environment has comes first, then the tools; its own module of this name is read as well.
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
tools = os.environ.get("GYRE_TOOLS")
if tools and os.path.isdir(tools) and tools not in sys.path:
    sys.path.append(tools)
sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize
except ImportError:
    pass
""",
}
"""Name -> text of a module."""

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
wanted=
while [ $# -gt 0 ]; do
  case "$1" in
    --with|-w) wanted="$wanted $2"; shift 2 ;;
    --with=*) wanted="$wanted ${1#--with=}"; shift ;;
    -p|--python|--from|--index-url|--with-requirements|--with-editable) shift 2 ;;
    --) shift; break ;;
    -*) shift ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || { echo "uvx: there is no program named" >&2; exit 2; }
name=${1%%[@=<>]*}; shift
missing=$(python3 - $wanted "$name" <<'END'
import importlib.metadata, importlib.util, os, re, shutil, sys
def there(name):
    try:
        importlib.metadata.version(name)
        return True
    except importlib.metadata.PackageNotFoundError:
        module = re.sub("[-.]", "_", name.lower())
        return importlib.util.find_spec(module) is not None or shutil.which(name) is not None
names = [re.split(r"[=<>!~\[;@ ]", word)[0] for word in sys.argv[1:]]
missing = [name for name in names if not there(name)]
tools = os.environ.get("GYRE_TOOLS", "")
if missing and os.path.isdir(tools):
    sys.path.append(tools)
    importlib.invalidate_caches()
    missing = [name for name in names if not there(name)]
    print("tools" if not missing else " ".join(missing))
else:
    print(" ".join(missing))
END
) || { echo "uvx: there is no python3 here" >&2; exit 2; }
case "$missing" in
  "") ;;
  tools) PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$GYRE_TOOLS; export PYTHONPATH ;;
  *) echo "uvx: there is no network here, and these are not there: $missing" >&2; exit 2 ;;
esac
module=$(printf %s "$name" | tr 'A-Z.-' 'a-z__')
if python3 -c "import $module" >/dev/null 2>&1; then exec python3 -m "$module" "$@"; fi
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
      python|python3)
        shift
        [ -d "$GYRE_TOOLS" ] && PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$GYRE_TOOLS && export PYTHONPATH
        exec python3 "$@" ;;
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
import importlib.metadata, importlib.util, os, re, sys
name = re.split(r"[=<>!~\[;@ ]", sys.argv[1])[0]
sys.path += [folder for folder in [os.environ.get("GYRE_TOOLS", "")] if os.path.isdir(folder)]
try:
    importlib.metadata.version(name)
except importlib.metadata.PackageNotFoundError:
    sys.exit(importlib.util.find_spec(re.sub("[-.]", "_", name.lower())) is None)
END
  shift
done
exit 0
"""

_PYTEST = r"""#!/bin/sh
# pytest: the environment's own program; else the module of its Python, which the tools have.
here=$(dirname "$0")
old=$IFS; IFS=:
for folder in $PATH; do
  [ "$folder" != "$here" ] && [ -x "$folder/pytest" ] && IFS=$old && exec "$folder/pytest" "$@"
done
IFS=$old
# As the program does and `python3 -m pytest` does not: the current folder is none of Python's.
exec python3 -c 'import sys
sys.path.pop(0)
sys.argv[0] = "pytest"
import pytest
sys.exit(pytest.main())' "$@"
"""

SHIMS = {
    "apt-get": _APT, "apt": _APT, "curl": _CURL, "wget": _CURL, "uv": _UV, "uvx": _UVX, "pip": _PIP, "pip3": _PIP,
    "pytest": _PYTEST,
}  # fmt: skip
"""Name -> text of an executable file."""
