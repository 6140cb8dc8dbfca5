#!/usr/bin/env bash
# Lint, types and floors: everything that can be said about the code without running it.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/check.sh [--fix]

Runs ruff (lint and format), mypy --strict on offload/, import-linter (the floors of docs/architecture.md) and
clang-format on native/. --fix lets ruff and clang-format rewrite what they can first.
Uses the active environment, or else the one that scripts/test.sh makes.
TEXT
}

fix=
case ${1:-} in
-h | --help) usage && exit 0 ;;
--fix) fix=1 ;;
"") ;;
*) usage >&2 && exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z ${VIRTUAL_ENV:-} && -d .venv ]]; then
    PATH=$PWD/.venv/bin:$PATH
fi

# An editable install leaves what CMake made for itself in native/.
mapfile -t native < <(find native tests/native -name CMakeFiles -prune -o \( -name '*.cpp' -o -name '*.h' -o -name '*.c' \) -print | sort)
if [[ -n $fix ]]; then
    ruff check --fix .
    ruff format .
    clang-format -i "${native[@]}"
fi

set -x
ruff check .
ruff format --check .
clang-format --dry-run --Werror "${native[@]}"
mypy
lint-imports
