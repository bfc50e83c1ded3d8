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

locks=launcher/locks
wanted=$(cat pyproject.toml Makefile scripts/setup.sh launcher/installation/uv_like_pip.py trainer/system/passes/passes.c $locks/*.txt | cksum)
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

# What is installed: the files that the locks name by their hashes, as wheels, and nothing else.
rules='--require-hashes --no-deps --only-binary :all:'

# A terminal sees progress, and a failure in full. Else a failure is one line, and a file.
attempt() {
    local what=$1
    shift
    if [ -t 2 ]; then
        "$@" >&2 || fail "$what could not be installed"
    elif ! "$@" >"$VENV/setup.log" 2>&1; then
        fail "$what could not be installed: $(reason) (more in $VENV/setup.log)"
    fi
}

# The innermost cause that pip or uv names.
reason() {
    sed -nE 's/^ *(ERROR|error|[Cc]aused by|cause): *//p' "$VENV/setup.log" | tail -n 1
}

uv_install() { "$VENV/bin/python" launcher/installation/uv_like_pip.py pip install --python "$VENV/bin/python" "$@"; }

# shellcheck disable=SC2086 # the rules are words
install_packages() {
    local torch=torch-$kind
    [ "$(uname -s)" != Darwin ] || torch=torch-cuda # PyPI's one build for a Mac
    # uv comes by pip, and everything else by uv: seconds instead of minutes.
    attempt uv "$VENV/bin/python" -m pip install -qq --no-input --no-compile \
        --disable-pip-version-check $rules -r $locks/uv.txt
    if [ "$torch" = torch-cpu ] && ! uv_install -q --dry-run $rules -r $locks/torch-cpu.txt 2>/dev/null; then
        UV_DEFAULT_INDEX=$TORCH_CPU_INDEX attempt \
            "the CPU build of torch from $TORCH_CPU_INDEX (make setup TORCH_CPU_INDEX=URL takes another)" \
            uv_install $rules -r $locks/torch-cpu.txt
    fi
    # With bytecode: a process may be set to write none, as is common in containers, and would then
    # spend as long on compiling torch's sources as on running them.
    attempt "a package" uv_install --compile-bytecode $rules -r $locks/dev.txt -r "$locks/$torch.txt"
    # With the setuptools of the lock: an isolated build would fetch one.
    # uv leaves the lock of a build in the temporary folder.
    mkdir -p "$VENV/tmp"
    TMPDIR=$PWD/$VENV/tmp attempt Motley uv_install --no-deps --no-build-isolation --editable .
    rm -r "$VENV/tmp"
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
        why="as TORCH=cuda asks"
        [ "$TORCH" = auto ] && why="for the NVIDIA GPU that nvidia-smi shows"
        say "  1. torch $TORCH_VERSION for CUDA, $why (several GB)"
    else
        say "  1. torch $TORCH_VERSION for CPU, to train (190 MB to download, 0.9 GB on disk)"
    fi
    say "  2. what Motley imports, and its developer tools: docs/dependencies.md says why (about 300 MB to download, 1.4 GB on disk)"
    mkdir -p "$VENV"
    write_stamp unfinished
    "$python" -m venv "$VENV"
else
    say "updating $VENV: the project or its locks changed"
    write_stamp unfinished
fi

install_packages
say "$("$VENV/bin/python" -P -m trainer.system.passes)"
rm -f "$VENV/setup.log"

write_stamp "$wanted"
say "done in $((SECONDS - started)) s: $("$VENV/bin/python" --version), torch for $kind, tools in $VENV/bin"
