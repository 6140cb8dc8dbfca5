#!/usr/bin/env bash
# What a person with one GPU of 24 GB runs: looks at the machine, plans, measures the disk, fine-tunes, draws a report.
set -euo pipefail

usage() {
    cat <<TEXT
usage: scripts/finetune_7b.sh --model DIR --swap DIR --out DIR [options] FILE... [-- options of offload finetune]

Fine-tunes a model of about 7 billion parameters on one GPU with 24 GB, 64 GB of RAM and an NVMe SSD, on text or JSONL files:

  1. offload doctor     stops if the swap directory cannot be used
  2. offload plan       stops if the model does not fit
  3. offload tune       measures the disk once; OUT/swap.toml is kept for the next time
  4. offload finetune   saves a checkpoint now and then; run this again with the same words, and it goes on
  5. offload report     OUT/report.html

  --model DIR        model directory, or hub id
  --swap DIR         directory on the SSD; may be given several times, once for each disk
  --out DIR          receives the model, run.json, checkpoints, the report
  --gpu-mem SIZE     budget of GPU memory (default: $gpu_mem, which leaves 8 GB for activations)
  --cpu-mem SIZE     budget of host memory (default: $cpu_mem)
  --steps N          optimizer steps (default: $steps)
  --seq-len L        tokens in a block (default: $seq_len)
  --batch-size B     blocks in a forward pass (default: $batch_size)
  --save-every N     steps between checkpoints (default: $save_every)
  --quick            measure the disk for a few seconds only

example: scripts/finetune_7b.sh --model Llama-2-7b-hf --swap /mnt/nvme/swap --out tuned notes/*.txt -- --lr 1e-5

For other machines, give other budgets: configs/ has what goes with which. Exit codes are those of \`offload finetune\`.
TEXT
}

model=
out=
swap=()
data=()
gpu_mem=16GiB
cpu_mem=52GiB
steps=500
seq_len=1024
batch_size=4
save_every=100
measure=()

# shellcheck source=scripts/lib/offload.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/offload.sh"

while (($#)); do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --model | --out | --gpu-mem | --cpu-mem | --steps | --seq-len | --batch-size | --save-every)
        (($# > 1)) || fail "$1 needs a value"
        name=${1#--}
        printf -v "${name//-/_}" %s "$2"
        shift 2
        ;;
    --swap)
        (($# > 1)) || fail "$1 needs a value"
        swap+=("$2")
        shift 2
        ;;
    --quick)
        measure=(--size 64MiB --seconds 5)
        shift
        ;;
    --)
        shift
        break
        ;;
    -*) usage >&2 && exit 2 ;;
    *)
        data+=("$1")
        shift
        ;;
    esac
done
if [[ -z $model || -z $out ]] || ((${#swap[@]} == 0 || ${#data[@]} == 0)); then
    usage >&2
    exit 2
fi
for file in "${data[@]}"; do
    [[ -f $file && -r $file ]] || fail "$file is not a file that can be read"
done
mkdir -p -- "$out" || fail "cannot make $out; name a directory where you may write"
for dir in "${swap[@]}"; do
    make_private "$dir"
done

# shellcheck disable=SC2153  # OFFLOAD is set by offload.sh
say "looking at this machine"
"${OFFLOAD[@]}" doctor --swap "${swap[@]}"

say "planning"
settings=(--gpu-mem "$gpu_mem" --cpu-mem "$cpu_mem" --dtype bf16)
plan=("${OFFLOAD[@]}" plan --model "$model" --tiers 'gpu,cpu,nvme' --swap "${swap[@]}" "${settings[@]}"
    --batch-size "$batch_size" --seq-len "$seq_len" --recompute)
"${plan[@]}" || {
    code=$?
    ((code != 1)) || say "this does not fit: give larger budgets, or a smaller model"
    exit "$code"
}
"${plan[@]}" --json >"$out/plan.json"

if [[ ! -e $out/swap.toml ]]; then
    say "measuring the disk, once"
    "${OFFLOAD[@]}" tune --out "$out/swap.toml" "${measure[@]}" -- "${swap[@]}"
fi

say "fine-tuning; Ctrl-C saves a checkpoint, and the same command goes on from it"
"${OFFLOAD[@]}" finetune --model "$model" --data "${data[@]}" --config "$out/swap.toml" --swap "${swap[@]}" "${settings[@]}" \
    --steps "$steps" --seq-len "$seq_len" --batch-size "$batch_size" --gradient-checkpointing \
    --save-every "$save_every" --resume --out "$out" "$@"

"${OFFLOAD[@]}" report "$out" --plan "$out/plan.json"
