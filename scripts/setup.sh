#!/usr/bin/env bash
# Make or update the virtual environment; called by `make setup`, which sets the four variables.
# Python packages only, inside this folder: nothing here needs root.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${VENV:?run this through make setup}" "${TORCH:?}" "${TORCH_VERSION:?}" "${TORCH_CPU_INDEX:?}"

# What the environment was made from. It reads "unfinished" while one is made or changed, so that
# an interrupted set-up is seen, removed and made again.
stamp=$VENV/motley-setup
say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

case $TORCH in auto | cpu | cuda) ;; *) fail "TORCH=$TORCH: allowed are auto, cpu and cuda" ;; esac

wanted=$(cat pyproject.toml Makefile scripts/setup.sh | cksum)
have='' kind='' place=''
[ -f "$stamp" ] && { read -r have && read -r kind && read -r place; } <"$stamp" || true

if [ "$have" = "$wanted" ] && [ "$place" = "$PWD" ] && [ -x "$VENV/bin/python" ] && [[ $TORCH == auto || $TORCH == "$kind" ]]; then
    exit 0
fi

# --- which interpreter, which torch ---------------------------------------------------------

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed (set PYTHON to its path); Debian, Ubuntu: sudo apt-get install python3.11-venv"
}

# Debian and Ubuntu ship Python without the part that makes environments.
need_venv_module() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null && return
    local package
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $package (system package): $python lacks the venv module"
        apt-get -qq update >&2
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "$package" >&2
    else
        fail "$python lacks the venv module; run: sudo apt-get install $package"
    fi
}

choose_torch() {
    case $TORCH in
        auto) if nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
        *) echo "$TORCH" ;;
    esac
}

# --- the environment --------------------------------------------------------------------------

write_stamp() { printf '%s\n' "$1" "$kind" "$PWD" >"$stamp"; }

pip() {
    local quiet=-qq
    [ -t 2 ] && quiet='' # a terminal sees the downloads progress
    "$VENV/bin/python" -m pip install --no-input --no-compile --disable-pip-version-check $quiet "$@" >&2
}

install_torch() {
    if [ "$kind" = cuda ] || [ "$(uname -s)" = Darwin ]; then
        pip "torch==$TORCH_VERSION"
    elif "$VENV/bin/python" -m pip install -qq --no-input --no-deps --dry-run \
        "torch==$TORCH_VERSION+cpu" >/dev/null 2>&1; then
        pip "torch==$TORCH_VERSION+cpu"
    else
        # Its dependencies come from the usual index with the rest, below.
        pip --no-deps --index-url "$TORCH_CPU_INDEX" "torch==$TORCH_VERSION" ||
            fail "no CPU build of torch at $TORCH_CPU_INDEX; name another index: make setup TORCH_CPU_INDEX=URL"
    fi
}

python=$(find_python)
need_venv_module
new_kind=$(choose_torch)

if [ -f "$stamp" ]; then
    why=''
    if [ "$have" = unfinished ]; then
        why="its set-up was interrupted"
    elif [ "$place" != "$PWD" ]; then
        why="it was made in $place"
    elif [ "$kind" != "$new_kind" ]; then
        why="it has torch for $kind, not $new_kind"
    elif ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        why="its Python does not run"
    fi
    if [ -n "$why" ]; then
        say "removing $VENV: $why"
        rm -rf "$VENV"
    fi
fi
kind=$new_kind

started=$SECONDS
if [ ! -x "$VENV/bin/python" ]; then
    say "making $VENV with $("$python" --version), in this folder only, without root:"
    if [ "$kind" = cuda ]; then
        say "  1. torch $TORCH_VERSION for CUDA, to train on the NVIDIA GPU that nvidia-smi shows (several GB)"
    else
        say "  1. torch $TORCH_VERSION for CPU, to train (190 MB to download, 0.9 GB on disk)"
    fi
    say "  2. what Motley imports, and its developer tools: docs/dependencies.md says why (about 300 MB to download, 1.4 GB on disk)"
    mkdir -p "$VENV"
    write_stamp unfinished
    "$python" -m venv "$VENV"
else
    say "updating $VENV: pyproject.toml or the Makefile changed"
    write_stamp unfinished
fi

install_torch
echo "torch==$TORCH_VERSION" >"$VENV/constraints.txt"
pip --constraint "$VENV/constraints.txt" --editable '.[dev]'
# Here, since pip would use one core; and a process may be told to leave no bytecode, as containers
# like to: each would then spend as long on compiling torch's sources as on running them. The few
# files that are no Python are templates.
"$VENV/bin/python" -m compileall -qq -j 0 "$VENV"/lib/python3*/site-packages || true

write_stamp "$wanted"
say "done in $((SECONDS - started)) s: $("$VENV/bin/python" --version), torch for $kind, tools in $VENV/bin"
