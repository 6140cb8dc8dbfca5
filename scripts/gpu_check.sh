#!/usr/bin/env bash
# What must hold on a GPU, and a short benchmark there, with what the machine has. Downloads nothing.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/gpu_check.sh [--json FILE] [--swap DIR] [--small] [--no-tests] [--no-benchmark]

Checks on a CUDA device: the same bits for every placement, agreement with plain torch, budgets, and the project's own
tests if pytest and hypothesis are there; then a benchmark of a 7B shape with random weights, its weights streamed and
its state on the CPU, within 24 GB of GPU memory. Takes less than 8 minutes. Without a CUDA device it does the same on the
simulated device, at a small shape. Needs Python 3.10 and torch 2.11 or later, numpy, psutil, aiofiles and safetensors:
those of the machine, or of a folder .venv-device at the top of the tree, made elsewhere by scripts/gpu_check.sh --pack.

  --json FILE      write the results there (default: gpu_check.json in the current directory)
  --swap DIR       directory for swap files (default: a temporary one)
  --small          a small shape on a GPU as well
  --no-tests, --no-benchmark
  --pack           fill .venv-device for a machine without a network, and stop
TEXT
}

case ${1:-} in
-h | --help) usage && exit 0 ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

if [[ ${1:-} == --pack ]]; then
    # What is pure Python or built for the stable ABI, so that it serves other versions of Python too.
    "$python" -m pip install -qq --upgrade --no-deps --target "$root/.venv-device" -c "$root/constraints.txt" \
        psutil aiofiles safetensors pytest pluggy iniconfig packaging pygments pytest-timeout hypothesis sortedcontainers
    du -sh "$root/.venv-device"
    exit 0
fi

# Last on the path: what the machine has of its own comes first.
extra=$root/.venv-device
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
"$python" - <<'PY' || exit 2
import sys

if sys.version_info < (3, 10):
    sys.exit(f"gpu_check.sh: error: expected Python 3.10 or later, found {sys.version.split()[0]}; set PYTHON")
try:
    import torch
except ImportError:
    sys.exit("gpu_check.sh: error: this Python has no torch; set PYTHON to one that has")
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
    sys.exit(f"gpu_check.sh: error: expected torch 2.11 or later, found {torch.__version__}")
PY

# The native core of this tree, unless it is there already and loads.
if ! "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$root/offload/_lib/liboffload_native.so" 2>/dev/null &&
    command -v cmake >/dev/null && command -v c++ >/dev/null; then
    cmake -S "$root/native" -B "$root/build/native-device" -DCMAKE_BUILD_TYPE=Release >&2 &&
        cmake --build "$root/build/native-device" --parallel >&2 &&
        cmake --install "$root/build/native-device" --prefix "$root" >&2 ||
        echo "gpu_check.sh: the native core did not build; going on without it" >&2
fi

exec "$python" "$root/scripts/lib/gpu_check.py" --extra "$extra" "$@"
