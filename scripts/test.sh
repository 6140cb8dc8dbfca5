#!/usr/bin/env bash
# Everything that must hold, from nothing: makes an environment, builds the native core, checks, tests.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/test.sh [--no-check] [pytest arguments...]

Makes the environment .venv (or the one that OFFLOAD_VENV names), installs this package with its native core, runs
scripts/check.sh and then all tests, one process for each CPU (OFFLOAD_TEST_WORKERS=N for another number). Arguments are
handed to pytest: scripts/test.sh --no-check tests/unit -k swap
TEXT
}

check=1
case ${1:-} in
-h | --help) usage && exit 0 ;;
--no-check) check= && shift ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib/env.sh
source scripts/lib/env.sh

make_env test,hf
if [[ -n $check ]]; then
    scripts/check.sh
fi
say "running the tests"
exec python -m pytest -n "${OFFLOAD_TEST_WORKERS:-auto}" "$@"
