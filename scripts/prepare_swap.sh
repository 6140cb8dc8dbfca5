#!/usr/bin/env bash
# Makes directories for swap files and checks that they will do.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/prepare_swap.sh [--min-free SIZE] DIR...

Makes each DIR that is missing (with mode 0700: swap files hold your model), checks the room in it, and shows what
`offload doctor` says of them. Makes nothing if one of them exists and is not a directory.

  --min-free SIZE   room to expect on each file system, in df's units such as 400G (default: none)

example: scripts/prepare_swap.sh --min-free 400G /mnt/nvme0/swap /mnt/nvme1/swap

Exit code 0 if all will do, 1 if doctor finds one that will not, 2 for bad input.
TEXT
}

# shellcheck source=scripts/lib/offload.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/offload.sh"

min_free=0
dirs=()
while (($#)); do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --min-free)
        (($# > 1)) || { usage >&2 && exit 2; }
        min_free=$2
        shift 2
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
need=$(numfmt --from=auto "${min_free%B}" 2>/dev/null) ||
    fail "expected --min-free as 400G or 400Gi, found $min_free"

for dir in "${dirs[@]}"; do
    [[ ! -e $dir || -d $dir ]] || fail "$dir is not a directory; name another"
done
for dir in "${dirs[@]}"; do
    make_private "$dir"
    free=$(df -B1 --output=avail -- "$dir" | tail -n 1)
    ((free >= need)) || fail "expected $min_free free in $dir, found $(numfmt --to=iec "$free"); make room, or name another"
done

# shellcheck disable=SC2153  # OFFLOAD is set by offload.sh
exec "${OFFLOAD[@]}" doctor --swap "${dirs[@]}"
