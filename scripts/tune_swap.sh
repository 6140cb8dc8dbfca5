#!/usr/bin/env bash
# For a job file: makes the swap directories of this machine ready, measures them, and writes swap.toml.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/tune_swap.sh [--out FILE] [--if-missing] [options of offload tune] DIR...

Makes each DIR that is missing, measures all of them (at most a minute each) and writes FILE for
offload.wrap(model, config=FILE) and `offload finetune --config FILE`. Ctrl-C leaves nothing behind.

  --out FILE      default: swap.toml
  --if-missing    do nothing where FILE is there already
  others          --size SIZE, --seconds S, --backend NAME, --force, --json, --quiet: see `offload tune --help`

example, in a job file:

  scripts/tune_swap.sh --out "$TMPDIR/swap.toml" /mnt/nvme0/swap /mnt/nvme1/swap
  offload finetune --config "$TMPDIR/swap.toml" --model DIR --data notes/*.txt --out tuned

Exit code 0 if FILE is there, 1 if measuring failed, 2 for bad input, 130 after Ctrl-C.
TEXT
}

# shellcheck source=scripts/lib/offload.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/offload.sh"

out=swap.toml
if_missing=
options=()
dirs=()
while (($#)); do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --if-missing)
        if_missing=1
        shift
        ;;
    --out | --size | --seconds | --backend)
        (($# > 1)) || { usage >&2 && exit 2; }
        if [[ $1 == --out ]]; then out=$2; else options+=("$1" "$2"); fi
        shift 2
        ;;
    --force | --json | --quiet)
        options+=("$1")
        shift
        ;;
    --)
        shift
        dirs+=("$@")
        break
        ;;
    -*) usage >&2 && exit 2 ;;
    *)
        dirs+=("$1")
        shift
        ;;
    esac
done
((${#dirs[@]})) || { usage >&2 && exit 2; }
if [[ -n $if_missing && -e $out ]]; then
    say "$out is there already"
    exit 0
fi

for dir in "${dirs[@]}"; do
    make_private "$dir"
done
# shellcheck disable=SC2153  # OFFLOAD is set by offload.sh
exec "${OFFLOAD[@]}" tune --out "$out" "${options[@]}" -- "${dirs[@]}"
