"""`offload finetune`: a transformers causal language model, the plain loop, and the two lines that wrap it.

Everything that is special about offloading is in `FinetuneRun._wrap`; the rest would be the same without it.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from offload.errors import ConfigError, WriteBudgetError
from offload.integrations.crew import Crew
from offload.integrations.data import Blocks, batches, make_blocks, read_documents, tokenise
from offload.integrations.finetune_config import FinetuneConfig
from offload.integrations.interrupt import StopRequest, stop_on_signals
from offload.integrations.loading import (
    checkpoint_activations,
    find_model,
    load_model,
    load_tokenizer,
    max_positions,
)
from offload.integrations.progress import Progress, StepFigures, Work
from offload.integrations.run_checkpoints import Generators, RunCheckpoints
from offload.integrations.run_plan import plan_of_run, said
from offload.integrations.run_report import LaneFigures, RunReport, TierFigures, added
from offload.integrations.step_trace import StepTrace
from offload.progress import listening
from offload.sizes import format_size

__all__ = ["FinetuneRun"]


class FinetuneRun:
    """One fine-tuning run. Making it does all that can fail for bad input; `train` then does the work.

    Raises:
        ConfigError, BudgetError, SwapError: what was asked for is not possible; nothing was written.
        CheckpointError: the checkpoint to resume from is damaged or of another model.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        import offload

        self.config = config
        self.exit_code = 0  # after `train`: what a program should exit with
        self.crew = Crew()
        self._has_earlier()
        self.quiet = config.quiet or not self.crew.first
        self.progress = Progress(config.steps, quiet=self.quiet)
        self._work = Work(quiet=self.quiet)
        self.report = RunReport(config.as_json(), offload.build_info(**config.wrap))
        with self._phase("load"):
            source = find_model(config.model)
            documents = list(read_documents(config.data))
            held_out = list(read_documents(config.eval_data))
            if not documents:
                raise ConfigError(f"no text in {', '.join(str(path) for path in config.data)}; give files with text")
            self.tokenizer = load_tokenizer(source)
            self.blocks: Blocks = make_blocks(
                [tokenise(document, self.tokenizer) for document in documents],
                config.seq_len,
                eval_fraction=config.eval_fraction,
                seed=config.seed,
                held_out=[tokenise(document, self.tokenizer) for document in held_out] if config.eval_data else None,
            )
            self.report.blocks = {
                "train": len(self.blocks.train),
                "held_out": len(self.blocks.held_out),
                "held_out_by": self.blocks.held_out_by,
                "tokens_each": config.seq_len,
            }
            self.progress.say(
                f"data: {len(self.blocks.train)} blocks of {config.seq_len} tokens to train on, "
                f"{len(self.blocks.held_out)} held out (by {self.blocks.held_out_by})"
            )
            loaded = load_model(source)
            self.model, self._weights = loaded.model, loaded.weights
            if loaded.whole:
                self.progress.say(f"model: loaded whole into host memory before it is wrapped ({loaded.whole})")
            self._check_model()
        with listening(self._work), self._work:
            with self._phase("plan"):
                self.report.plan = plan_of_run(self.model, config, self.crew.count) if self.crew.first else None
            with self._phase("wrap"):
                self._wrap()
            if foretold := said(self.report.plan):
                self.progress.say(foretold)
            self._resume()
        try:
            config.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the directory {config.out} for the result: {error.strerror}") from error

    def _wrap(self) -> None:
        import offload

        torch.manual_seed(self.config.seed)
        offload.wrap(self.model, weights=self._weights, strict=self.config.strict, **self.config.wrap)
        if self.crew.rank:
            torch.manual_seed(self.config.seed + self.crew.rank)  # each its own dropout
        self.optimizer = offload.AdamW(
            self.model.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay
        )
        self.scaler = torch.amp.GradScaler(self._device().type, enabled=self._dtype() == torch.float16)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.config.lr_factor)
        self.checkpoints = RunCheckpoints(self.config, self.blocks, self._dtype())

    def _has_earlier(self) -> bool:
        """Has any process a checkpoint to go on from? ConfigError where it is not to go on. Collective."""
        config = self.config
        there = self.crew.most(int(config.has_checkpoint)) > 0
        if there and not (config.resume or self.crew.restarted):
            raise ConfigError(
                f"{config.checkpoint_path} holds a checkpoint of an earlier run; go on from it by --resume, remove it, "
                "or give another --out"
            )
        return there

    def _resume(self) -> None:
        config = self.config
        if not self._has_earlier():
            if config.resume:
                self.progress.say(f"no checkpoint in {config.out} yet: starting from the beginning")
            return
        with self._phase("resume"):
            done = self.checkpoints.resume(self.model, self.optimizer, self.scaler, self.report)
        self.schedule.last_epoch = done
        self.progress = Progress(config.steps, quiet=self.quiet, done=done)
        self.progress.say(f"resumed after step {done} of {config.steps}")

    def _check_model(self) -> None:
        """What only the loaded model can tell, and what would otherwise fail hours later."""
        config, model = self.config, self.model
        longest = max_positions(model)
        if longest is not None and config.seq_len > longest:
            raise ConfigError(f"expected seq_len up to {longest}, the longest this model takes, found {config.seq_len}")
        rows = model.get_input_embeddings().weight.shape[0]
        largest = max(int(part.max()) for part in (self.blocks.train, self.blocks.held_out) if part.numel())
        if largest >= rows:
            raise ConfigError(
                f"the tokenizer gives ids up to {largest}, the model has {rows} embeddings: they do not belong together"
            )
        parameters = list(model.parameters())  # a tied one appears once
        self.report.parameters = sum(p.numel() for p in parameters)
        place = next(parent for parent in (config.out, *config.out.absolute().parents) if parent.exists())
        needed, free = sum(p.nbytes for p in parameters), shutil.disk_usage(place).free
        if config.save_every:  # one more while a new one is written beside the old
            needed += (config.keep + 1) * 12 * self.report.parameters - _size_of(config.checkpoint_path)
        if needed > free:
            raise ConfigError(
                f"the result{' and its checkpoints need' if config.save_every else ' needs'} about "
                f"{format_size(needed)} in {config.out}, which has {format_size(free)} free; "
                "give another directory or make room"
            )
        if config.gradient_checkpointing:
            checkpoint_activations(model)

    def train(self) -> RunReport:
        """Evaluate, train, evaluate, save the model and write the report. A signal ends training early, not the rest.

        After a signal the second evaluation is left out, and a run with checkpoints saves one instead of the model;
        `RunReport.stopped_by` names the signal.

        Raises:
            WriteBudgetError: the next step would pass the write budget; a checkpoint was saved.
        """
        config, report = self.config, self.report
        path = config.trace_path if self.crew.first else config.trace_path.with_suffix(f".{self.crew.rank}.json")
        trace = StepTrace(path, len(report.steps), config.steps, self._held)
        catch = stop_on_signals(quiet=self.quiet, within=config.stop_within, together=self.crew.most)
        with self.progress, self._work, listening(self._work), contextlib.closing(trace), catch as stop:
            self._tell_writes()
            if not report.steps:
                report.eval_loss["before"] = self._evaluate("before", stop)
            try:
                self._steps(stop, trace)
            except WriteBudgetError as error:
                raise self._out_of_writes(error) from error
            if not stop.asked():
                report.eval_loss["after"] = self._evaluate("after", stop)
            self._figures()
            with self._phase("save"):
                self._saved()
                if stop.asked() and config.checkpoints:
                    self._checkpoint()
                else:
                    self._save()
            report.stopped_by, self.exit_code = stop.name, stop.exit_code
            if trace.write():
                report.step_trace = {"file": path.name, "step": trace.step}
            if self.crew.first:
                report.write(config.report_path)
        self.crew.close()
        return report

    def _steps(self, stop: StopRequest, trace: StepTrace) -> None:
        import offload

        config, model, optimizer, report = self.config, self.model, self.optimizer, self.report
        device, scaler = self._device(), self.scaler
        together = config.batch_size * self.crew.count
        data = batches(self.blocks.train, together, config.steps * config.grad_accum, config.seed)
        done = len(report.steps)
        data = itertools.islice(data, done * config.grad_accum, None)
        model.train()
        earlier, earlier_s, before = report.lanes, report.seconds, self._lanes()
        start = time.perf_counter()

        def total() -> None:
            """What the whole run has taken, earlier parts of it included."""
            report.lanes = added(earlier, self._lanes(before))
            saving = report.phases.get("checkpoints", 0.0)
            report.seconds = earlier_s + time.perf_counter() - start - saving
            report.skipped_steps = optimizer.skipped_steps

        for number in range(done, config.steps):
            if stop.asked():
                break
            step_start, step_lanes = time.perf_counter(), self._lanes(wait=False)
            generators = Generators(device)
            lr = optimizer.param_groups[0]["lr"]
            loss_sum = torch.zeros((), device=device)
            held: dict[str, int] = {}
            for _ in range(config.grad_accum):
                loss = self._loss(self.crew.part(next(data)).to(device))
                self._see(held)
                scaler.scale(loss / config.grad_accum).backward()  # type: ignore[no-untyped-call]
                self._see(held)
                loss_sum += loss.detach().float()
            scaler.unscale_(optimizer)
            norm = None
            if config.clip > 0:
                norm = float(offload.clip_grad_norm_(model.parameters(), config.clip))
            trace.before_update(number)
            try:
                scaler.step(optimizer)
            except WriteBudgetError:
                generators.put_back()  # the step was not taken, and will draw the same numbers when it is
                total()
                raise
            trace.after_update(number)
            scaler.update()
            optimizer.zero_grad()
            self.schedule.step()
            self._see(held)
            measured = offload.stats(model, wait=False).step  # waiting here would hide nothing of the update
            if measured is not None:
                report.count(measured.as_dict())
            figures = StepFigures(
                loss=self.crew.mean(loss_sum.item() / config.grad_accum),
                lr=lr,
                grad_norm=norm,
                seconds=time.perf_counter() - step_start,
                tokens=config.tokens_per_step * self.crew.count,
                lanes={name: lane.bytes for name, lane in self._lanes(step_lanes, wait=False).items()},
                bound="" if measured is None else measured.bound,
                held=held,
            )
            report.steps.append(figures)
            self.progress.step(figures)
            self._saved(wait=False)
            if config.save_every and len(report.steps) % config.save_every == 0:
                total()
                self._checkpoint(background=True)
        total()

    def _tell_writes(self) -> None:
        """How much this run will write to swap space, which wears a disk out."""
        import offload

        left = self.config.steps - len(self.report.steps)
        per_step = sum(by_tier.get("nvme", 0) for by_tier in offload.stats(self.model).placement.values())
        self.report.swap_bytes_per_step = per_step
        if per_step and left:
            all_steps = format_size(per_step * left)
            self.progress.say(f"swap: each step writes {format_size(per_step)}, {left} steps {all_steps}")

    def _checkpoint(self, background: bool = False) -> bool:
        """Save one, once the one before has ended. False if the disk refused it, where training goes on."""
        self._saved()
        with self._saving():
            self.checkpoints.begin(self.model, self.optimizer, self.scaler, self.report, background)
        return self._saved(wait=not background)

    def _saved(self, wait: bool = True) -> bool:
        """Say how the save that was begun went, if it has ended; with ``wait``, after its end."""
        if not self.checkpoints.begun:
            return True
        with self._saving():
            outcome = self.checkpoints.end(self.report, wait)
        if outcome:
            self.progress.warn(outcome)
        elif outcome is not None:
            self.progress.say(f"checkpoint of step {self.checkpoints.step} in {self.config.checkpoint_path}")
        return not outcome

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Count the time as that of checkpoints."""
        start, phases = time.perf_counter(), self.report.phases
        try:
            yield
        finally:
            phases["checkpoints"] = phases.get("checkpoints", 0.0) + time.perf_counter() - start

    def _out_of_writes(self, error: WriteBudgetError) -> WriteBudgetError:
        """Save what there is; returns the error to end with."""
        report, path = self.report, self.config.checkpoint_path
        report.stopped_by = "write_budget"
        self._figures()
        saved = self._checkpoint()
        report.write(self.config.report_path)
        how = f"after step {len(report.steps)}: a checkpoint is in {path}, --resume goes on from it"
        return WriteBudgetError(f"{how if saved else report.failed_checkpoints[-1]}. {error}")

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    @torch.no_grad()
    def _evaluate(self, when: str, stop: StopRequest) -> float | None:
        """Mean loss in nats per token on held-out blocks; None if there are none, or a signal came."""
        config = self.config
        blocks = self.blocks.held_out[: config.eval_batches * config.batch_size]
        if len(blocks) == 0:
            return None
        device = self._device()
        total = 0.0
        self.model.eval()
        with self._phase(f"evaluate_{when}"):
            for batch in torch.split(blocks, config.batch_size):
                if stop.asked():
                    return None
                total += float(self._loss(batch.long().to(device))) * len(batch)
        self.progress.say(f"held-out loss {when} training: {total / len(blocks):.4f} nats per token")
        return total / len(blocks)

    def _figures(self) -> None:
        import offload

        stats = offload.stats(self.model)
        self.report.tiers = {n: TierFigures(t.used, t.peak, t.budget, t.by_kind) for n, t in stats.tiers.items()}
        self.report.placement = {kind: dict(by_tier) for kind, by_tier in stats.placement.items()}

    def _see(self, held: dict[str, int]) -> None:
        """Raise `held` to what each tier holds now."""
        for name, nbytes in self._held().items():
            held[name] = max(held.get(name, 0), nbytes)

    def _held(self) -> dict[str, int]:
        import offload

        return {name: tier.used for name, tier in offload.stats(self.model, wait=False).tiers.items()}

    def _save(self) -> None:
        import offload

        self.model.config.dtype = self._dtype()  # what the files hold, so that it loads as it was saved
        offload.save_pretrained(self.model, self.config.out)
        if self.crew.first:
            self.tokenizer.save_pretrained(self.config.out)

    def _lanes(self, since: dict[str, LaneFigures] | None = None, wait: bool = True) -> dict[str, LaneFigures]:
        import offload

        zero, since = LaneFigures(0, 0.0), since or {}
        return {
            name: LaneFigures(
                lane.bytes - since.get(name, zero).bytes, max(0.0, lane.busy_s - since.get(name, zero).busy_s)
            )
            for name, lane in offload.stats(self.model, wait=wait).lanes.items()
        }

    def _device(self) -> torch.device:
        parameter: torch.Tensor = next(self.model.parameters())
        return parameter.device

    def _dtype(self) -> torch.dtype:
        parameter: torch.Tensor = next(self.model.parameters())
        return parameter.dtype

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.report.phases[name] = time.perf_counter() - start


def _size_of(folder: Path) -> int:
    """Bytes of the files below a directory; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
