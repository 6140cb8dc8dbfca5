# shellcheck shell=bash
# Shared by scripts that call the program; sourced, not run. Makes and installs nothing.
#
# make_private DIR   makes a directory that is missing, with mode 0700, and those above it.
# OFFLOAD   an array, the command: this tree by $PYTHON if that is set, what scripts/test.sh installed, what is on PATH,
#           or this tree by python3.

# shellcheck source=scripts/lib/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

make_private() {
    [[ -d $1 ]] || (umask 077 && mkdir -p -- "$1") || fail "cannot make $1; name a directory where you may write"
}

# shellcheck disable=SC2034  # used by those who source this
if [[ -z ${PYTHON:-} && -x $VENV/bin/offload ]]; then
    OFFLOAD=("$VENV/bin/offload")
elif [[ -z ${PYTHON:-} ]] && command -v offload >/dev/null; then
    OFFLOAD=(offload)
else
    OFFLOAD=(env "PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" -m offload.cli)
fi
