#!/usr/bin/env bash
# All that only a real GPU can show, in parts of at most eight minutes:
#   scripts/gpu_report.sh [--out DIR] [--rehearse] [--gpu NAME] [--model DIR] check|speed|users|vulkan...
# Without `make setup`'s environment VENV names another; the rest is said by scripts/gpu_report.py.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${VENV:-.venv}/bin/python" scripts/gpu_report.py "$@"
