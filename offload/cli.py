"""`offload finetune | doctor`: the command line.

Exit codes: 0 done; 1 training failed; 2 bad input, nothing was done; 130 and 143: ended early by SIGINT (Ctrl-C) or
SIGTERM, the result up to there saved. Nothing heavy is imported before it is known to be needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from offload.errors import ConfigError, OffloadError
from offload.sizes import format_size, parse_size

if TYPE_CHECKING:
    from offload.integrations.finetune_config import FinetuneConfig
    from offload.integrations.run_report import RunReport

__all__ = ["main"]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return the exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print("offload: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ConfigError as error:
        return _fail(error, EXIT_BAD_INPUT)


def _fail(error: Exception, code: int) -> int:
    print(f"offload: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is a --help away."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        print(f"offload {_version()}")
        parser.exit()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("offload")
    except PackageNotFoundError:
        return "(not installed; running from its source tree)"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="offload",
        description="Fine-tune models larger than your GPU: training state across GPU, CPU memory and NVMe.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _add_finetune(commands)
    doctor = commands.add_parser(
        "doctor", help="what this machine offers, what was chosen, and why", allow_abbrev=False
    )
    doctor.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="possible swap directories to try out")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_finetune(commands: Any) -> None:
    finetune = commands.add_parser(
        "finetune",
        help="fine-tune a causal language model on text",
        description="Fine-tune a transformers causal language model on text or JSONL files.",
        epilog="Ctrl-C or SIGTERM: the running step is finished, the model saved and run.json written; then the exit "
        "code is 130 or 143. A second one stops at once. Bad input exits with 2, a failed training with 1.",
        allow_abbrev=False,
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
    text.add_argument("--report", type=Path, metavar="FILE", help="figures of the run (run.json in --out)")

    place = finetune.add_argument_group("placement")
    place.add_argument(
        "--tiers", metavar="T,T", help="where training state may live, fastest first: gpu[,cpu][,nvme] (gpu,cpu)"
    )
    for tier in ("gpu", "cpu", "nvme"):
        place.add_argument(f"--{tier}-mem", type=_size, metavar="SIZE", help=f"budget of {tier}, as in 20GiB or 512MB")
    place.add_argument("--swap", nargs="+", type=Path, metavar="DIR", help="directories for swap files (tier nvme)")
    place.add_argument("--dtype", choices=("bf16", "fp32", "fp16"), help="compute dtype (bf16 on a GPU, else model's)")
    place.add_argument("--device", metavar="NAME", help="device that computes, as in cuda:0 or cpu")
    place.add_argument("--config", type=Path, metavar="FILE.toml", help="settings of offload.wrap; flags win over them")

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


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _finetune(arguments: argparse.Namespace) -> int:
    from offload.integrations.finetune import FinetuneRun

    try:
        run = FinetuneRun(_finetune_config(arguments))
    except OffloadError as error:  # swap space that cannot be had is bad input too, as long as nothing was trained
        return _fail(error, EXIT_BAD_INPUT)
    try:
        report = run.train()
    except (OffloadError, OSError) as error:
        return _fail(error, EXIT_FAILED)
    if not arguments.quiet:
        _summarise(run.config, report)
    return run.exit_code


def _finetune_config(arguments: argparse.Namespace) -> FinetuneConfig:
    from offload.integrations.finetune_config import FinetuneConfig

    names = (
        *("model", "eval_fraction", "eval_batches", "out", "report", "steps", "seq_len", "batch_size", "grad_accum"),
        *("lr", "warmup_steps", "weight_decay", "clip", "seed", "gradient_checkpointing", "quiet"),
    )
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return FinetuneConfig(
        data=tuple(arguments.data), eval_data=tuple(arguments.eval_data), wrap=_wrap_arguments(arguments), **given
    )


def _wrap_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `offload.wrap`, checked before a model is loaded: the flags over --config over the defaults."""
    from offload.config import WrapConfig

    tiers, swap = arguments.tiers, arguments.swap
    budgets = {tier: size for tier in ("gpu", "cpu", "nvme") if (size := getattr(arguments, f"{tier}_mem")) is not None}
    if arguments.config is None:
        tiers = tiers or "gpu,cpu"
        if "nvme" in tiers and not swap:
            raise ConfigError("tier nvme needs a place for its files; give --swap DIR on a fast disk")
        if swap and "nvme" not in tiers:
            raise ConfigError(f"--swap given, but the tiers are {tiers}; add nvme to --tiers or drop --swap")
        base = None
    else:
        base = WrapConfig.from_toml(arguments.config)
        if budgets:
            budgets = {**{t: b for t, b in base.budgets.as_dict().items() if b is not None}, **budgets}
    config = WrapConfig.make(
        base, tiers=tiers, budgets=budgets or None, swap_dirs=swap, dtype=arguments.dtype, device=arguments.device
    )
    return {"tiers": list(config.tiers), "config": config}


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
    print(f"model and tokenizer: {config.out}; figures: {config.report_path}")


def _doctor(arguments: argparse.Namespace) -> int:
    import torch

    import offload
    from offload import native
    from offload.planning.hardware import available_memory, free_disk
    from offload.storage.io import backend_report

    io = backend_report()
    print(f"offload {_version()}, Python {sys.version.split()[0]}, torch {torch.__version__}")
    for name, value in offload.build_info().items():
        print(f"  {name}: {value if value != '' else '-'}")
    print(f"native core: {'yes' if native.available() else 'no: ' + native.reason()}")
    print(f"instruction set: {native.isa()} (runnable here: {', '.join(native.isas())}; force with OFFLOAD_ISA)")
    print(f"checksums: CRC-32C in {native.crc()} (force with OFFLOAD_CRC)")
    print(f"threads: {native.threads()} (force with OFFLOAD_THREADS)")
    print(f"I/O: {io.chosen}{'; not faster because ' + io.reason if io.reason else ''} (force with OFFLOAD_IO)")
    print(f"memory this process can still take: {format_size(available_memory())}")
    code = 0
    for directory in arguments.directories:
        missing = "" if directory.exists() else " (does not exist; wrap would make it there)"
        try:
            direct = _direct_io(directory)
        except OffloadError as error:
            code = _fail(error, EXIT_BAD_INPUT)
            continue
        how = "direct I/O (O_DIRECT) works" if direct else "no direct I/O here: transfers go through the page cache"
        print(f"{directory}{missing}: {format_size(free_disk(directory))} free, {how}")
    return code


def _direct_io(directory: Path) -> bool:
    """Whether swap files in `directory` are read and written past the page cache. Leaves nothing behind."""
    from offload.storage.io import open_backend
    from offload.storage.swap import SwapSpace

    made = not directory.exists()
    backend = open_backend()
    try:
        with SwapSpace([directory], backend) as swap:
            return all(swap.direct.values())
    finally:
        backend.close()
        if made and directory.exists():
            directory.rmdir()


if __name__ == "__main__":
    sys.exit(main())
