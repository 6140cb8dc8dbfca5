"""`offload finetune`: fine-tune a causal language model on text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.output import EXIT_BAD_INPUT, EXIT_FAILED, fail
from offload.cli.settings import add_settings, explained, wrap_config
from offload.errors import OffloadError
from offload.sizes import format_size

if TYPE_CHECKING:
    from offload.integrations.finetune_config import FinetuneConfig
    from offload.integrations.run_report import RunReport

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command to the parser of the program."""
    finetune = commands.add_parser(
        "finetune",
        help="fine-tune a causal language model on text",
        description="Fine-tune a transformers causal language model on text or JSONL files.",
        epilog="example: offload finetune --model DIR --data notes/*.txt --tiers gpu,cpu,nvme --swap /mnt/nvme/swap "
        "--out tuned\n\n"
        "Ctrl-C or SIGTERM: the running step is finished, the model saved (with --save-every or --resume: a checkpoint "
        "instead) and run.json written; then the exit code is 130 or 143. A second one stops at once, and so does "
        "--stop-within; the last checkpoint stays. Bad input exits with 2, a failed training with 1.",
    )
    finetune.set_defaults(run=_finetune)
    text = finetune.add_argument_group("model and text")
    text.add_argument("--model", required=True, metavar="DIR|FILE.gguf|ID", help="model directory, GGUF file or hub id")
    text.add_argument(
        "--data",
        required=True,
        nargs="+",
        type=Path,
        metavar="FILE",
        help='text files (one document each) or .jsonl files (a "text" or "messages" on each line)',
    )
    text.add_argument("--eval-data", nargs="+", type=Path, default=(), metavar="FILE", help="files to hold out")
    text.add_argument("--eval-fraction", type=float, metavar="F", help="else: share of --data to hold out (0.05)")
    text.add_argument("--eval-batches", type=int, metavar="N", help="held-out batches to evaluate at most (16)")
    text.add_argument("--out", required=True, type=Path, metavar="DIR", help="receives the model and its tokenizer")
    text.add_argument(
        "--no-strict", dest="strict", action="store_false", help="initialise what is missing in the model's weights"
    )
    text.add_argument("--report", type=Path, metavar="FILE", help="figures of the run (run.json in --out)")

    place = finetune.add_argument_group("placement")
    add_settings(place)

    saving = finetune.add_argument_group("checkpoints")
    saving.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints in --out (none)")
    saving.add_argument("--keep", type=int, metavar="N", help="checkpoints that stay (1)")
    saving.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out; start if there is none"
    )
    saving.add_argument(
        "--stop-within", type=float, metavar="S", help="seconds that a signal leaves for saving (no limit)"
    )

    loop = finetune.add_argument_group("training")
    loop.add_argument("--steps", type=int, metavar="N", help="optimizer steps (100)")
    loop.add_argument("--seq-len", type=int, metavar="L", help="tokens in a block (512)")
    loop.add_argument("--batch-size", type=int, metavar="B", help="blocks in a forward pass (4)")
    loop.add_argument("--grad-accum", type=int, metavar="A", help="forward passes in a step (1)")
    loop.add_argument("--lr", type=float, help="peak learning rate; a cosine takes it to zero (2e-5)")
    loop.add_argument("--warmup-steps", type=int, metavar="N", help="steps up to the peak (a tenth of all)")
    loop.add_argument("--weight-decay", type=float, metavar="W", help="decoupled weight decay (0.01)")
    loop.add_argument("--clip", type=float, metavar="NORM", help="largest gradient norm; 0: no clipping (1.0)")
    loop.add_argument("--seed", type=int, help="seed of the order of text and of dropout (0)")
    loop.add_argument("--gradient-checkpointing", action="store_true", help="compute activations again in backward")
    loop.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _finetune(arguments: argparse.Namespace) -> int:
    if arguments.show_config:
        print(explained(arguments), end="")
        return 0
    from offload.integrations.finetune import FinetuneRun

    try:
        run = FinetuneRun(_finetune_config(arguments))
    except OffloadError as error:  # swap space that cannot be had is bad input too, as long as nothing was trained
        return fail(error, EXIT_BAD_INPUT)
    try:
        report = run.train()
    except (OffloadError, OSError) as error:
        return fail(error, EXIT_FAILED)
    if not run.quiet:
        _summarise(run.config, report)
    return run.exit_code


def _finetune_config(arguments: argparse.Namespace) -> FinetuneConfig:
    from offload.integrations.finetune_config import FinetuneConfig

    names = (
        *("model", "eval_fraction", "eval_batches", "out", "report", "steps", "seq_len", "batch_size", "grad_accum"),
        *("lr", "warmup_steps", "weight_decay", "clip", "seed", "strict", "gradient_checkpointing", "quiet"),
        *("save_every", "keep", "resume", "stop_within"),
    )
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    config = wrap_config(arguments)  # checked before a model is loaded
    wrap = {"tiers": list(config.tiers), "config": config}
    return FinetuneConfig(data=tuple(arguments.data), eval_data=tuple(arguments.eval_data), wrap=wrap, **given)


def _summarise(config: FinetuneConfig, report: RunReport) -> None:
    before, after = report.eval_loss["before"], report.eval_loss["after"]
    shown = [f"{value:.4f}" if value is not None else "not measured" for value in (before, after)]
    change = f" ({after - before:+.4f})" if before is not None and after is not None else ""
    print(f"held-out loss, nats per token: {shown[0]} before, {shown[1]} after{change}")
    print(f"{len(report.steps)} steps in {report.seconds:.1f} s, {report.tokens_per_s:.0f} tokens/s")
    for name, tier in report.tiers.items():
        print(
            f"tier {name}: {format_size(tier.used)} held, {format_size(tier.peak)} at most, "
            f"of a budget of {format_size(tier.budget)}"
        )
    for name, lane in report.lanes.items():
        print(f"lane {name}: {format_size(lane.bytes)} in {lane.busy_s:.1f} s of transfers")
    stopped = report.stopped_by and config.checkpoints
    result = f"checkpoint: {config.checkpoint_path}, for --resume" if stopped else f"model and tokenizer: {config.out}"
    print(f"{result}; figures: {config.report_path}")
