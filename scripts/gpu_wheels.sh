#!/usr/bin/env bash
# Collect what a borrowed machine with a GPU and without a network lacks: `scripts/gpu_wheels.sh DIR`.
# It has Python 3.12 with torch for CUDA, transformers, peft, pyarrow and pytest; DIR then goes there
# with this checkout: `make setup SYSTEM=1 PYTHON=... WHEELS=DIR`. VERSION=3.13 for another Python.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:?usage: scripts/gpu_wheels.sh DIR}
python=${VENV:-.venv}/bin/python
[ -x "$python" ] || { echo "gpu_wheels.sh: no $python; run make setup first, or give VENV" >&2; exit 2; }
mkdir -p "$dir"

# The versions are those of the locks, and the hashes too.
packages=(annotated-types bitsandbytes blake3 cffi cryptography jinja2 ml-dtypes psutil pycparser
    pydantic pydantic-core pytest-repeat rendercanvas setuptools tensorboard
    typing-inspection wgpu)
names=$(IFS='|'; echo "${packages[*]}")
lock=$(mktemp)
trap 'rm -f "$lock"' EXIT
awk -v "names=^($names)==" '$0 ~ "^[a-z]" {kept = $0 ~ names} kept' launcher/locks/dev.txt >"$lock"
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux2014 manylinux_2_17; do
    platforms+=(--platform "${tag}_x86_64")
done
"$python" -m pip download -q --no-deps --require-hashes --only-binary=:all: --implementation cp \
    --python-version "${VERSION:-3.12}" "${platforms[@]}" -d "$dir" -r "$lock"

# Of bitsandbytes' dozen libraries, one for each CUDA, those of one CUDA and of the CPU.
for wheel in "$dir"/bitsandbytes-*.whl; do
    "$python" scripts/slim_bitsandbytes.py "$wheel" "${CUDA:-130}"
done

# The loader of Vulkan, which containers with a driver for computing alone lack: unpacked into /.
if command -v apt-get >/dev/null; then
    (cd "$dir" && apt-get -qq download libvulkan1) || echo "no libvulkan1: run apt-get update first" >&2
fi
printf '%s: %s files, %s\n' "$dir" "$(find "$dir" -type f | wc -l)" "$(du -sh "$dir" | cut -f1)"
