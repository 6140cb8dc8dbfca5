# shellcheck shell=bash
# Shared by env.sh and offload.sh beside this file; sourced, not run: where things are, and how scripts speak.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck disable=SC2034  # used by those who source this
VENV=${OFFLOAD_VENV:-$ROOT/.venv}

say() { printf '== %s\n' "$*" >&2; }

fail() {
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit 2
}
