#!/usr/bin/env bash
# Install Motley into an environment that is there: `make setup SYSTEM=1 [PYTHON=...] [WHEELS=DIR]`.
# Nothing is downloaded: what DIR holds is installed (scripts/gpu_wheels.sh collects it), the rest has
# to be there, and what is missing is named in one line.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "no program $python; set PYTHON to the path of a Python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: Python 3.11 or newer is needed (PYTHON=...)"
"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip"

# Debian and Ubuntu mark their Python as managed by apt; SYSTEM=1 asks for it all the same.
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    local what=$1
    shift
    "$python" -m pip install -q --no-index --no-deps "$@" >"$log" 2>&1 && return
    fail "$what could not be installed: $(sed -nE 's/^ *(ERROR|error): *//p' "$log" | tail -n 1)"
}

if [ -n "${WHEELS:-}" ]; then
    [ -d "$WHEELS" ] || fail "WHEELS=$WHEELS: no such folder"
    mapfile -t wheels < <(find "$WHEELS" -maxdepth 1 -name '*.whl' | sort)
    [ ${#wheels[@]} -gt 0 ] || fail "WHEELS=$WHEELS: holds no wheels"
    install "a wheel of $WHEELS" --no-compile "${wheels[@]}"
fi
# The one that pyproject.toml names for the build.
"$python" -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null ||
    fail "$python lacks setuptools 77 or newer, which builds Motley; add its wheel to WHEELS=DIR"
install Motley --no-build-isolation --editable .
"$python" -P scripts/missing_packages.py
say "done: $("$python" --version), $("$python" -P -m trainer.system.passes)"
