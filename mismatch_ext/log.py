"""`RunLog`, through which every host writes: what was measured since the last log, alarms, events and bad rows.

It brings four things together: the files (`metrics_file`), what adds up between two logs (`accumulator`), the alarms (`alarms`),
and rows that are kept as evidence (`evidence`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.accumulator import Accumulator
from mismatch_ext.alarms import ANEW, AlarmState, resumed, rules_of, unwatched, watch
from mismatch_ext.bad_rows import ALL, BadRows, BadRowWindow, Fault
from mismatch_ext.bad_rows import METRIC as BAD_ROWS_METRIC
from mismatch_ext.banner import banner
from mismatch_ext.checks import METRIC, Checks
from mismatch_ext.closing import closing_lines
from mismatch_ext.config import MismatchConfig
from mismatch_ext.correction import masked_metrics, masked_sums
from mismatch_ext.drift import drift_metrics
from mismatch_ext.errors import MismatchError
from mismatch_ext.events import ALARM, BAD_ROW_REASONS, BAD_ROWS, EVIDENCE, WEIGHT_SYNC
from mismatch_ext.evidence import OF_BAD_ROWS, Evidence, HeldBatch, Kept, set_aside
from mismatch_ext.gap import gap_metrics, gap_profiles, gap_sample
from mismatch_ext.growth import Growth, grown
from mismatch_ext.log_reading import read_run
from mismatch_ext.metrics_file import MetricsFile, ensure_writable
from mismatch_ext.names import PREFIX, SHORT, HostNames, own_name
from mismatch_ext.prefix_cache import cache_metrics
from mismatch_ext.ranks import ONE_PROCESS, Ranks
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.states import from_json, state, to_json
from mismatch_ext.sums import Sums, over_ranks, part
from mismatch_ext.terminal import say_in_run

logger = logging.getLogger(__name__)

PROFILE_EVERY = 5
"""Logs of the trainer between two records of the per-position and per-probability profiles."""
ALARMS_RAISED = PREFIX + "alarms_raised"
WEIGHT_SYNC_GAP = PREFIX + "weight_sync_gap"


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Result of a log: what was measured, the part of it to show, and the message of the alarm that stops training, or None."""

    metrics: dict[str, float]
    shown: dict[str, float]
    stop: str | None


@state
class LogState:
    """What a checkpoint holds of a log: counters that choose profiled steps and scattered tokens, and how the gaps have grown."""

    flushes: dict[str, int]
    created: int
    growths: dict[str, Growth]
    bad_rows: BadRowWindow = field(default_factory=BadRowWindow)
    reasons_seen: dict[str, int] = field(default_factory=dict)


class RunLog:
    """Measurements, alarms and events of one trainer; every rank has one, and the main process writes. Raises RunDirectoryError.

    A host calls `begin`, for each step `observe` on its batches and then `log`, and `end`. `info` builds the header of a segment,
    as `run_info` does, and `step` returns the number of finished optimizer steps. `checks` decides whether a failed check ends
    the run; None ends it. `tell` shows a warning to the user; None logs it.
    """

    def __init__(
        self,
        block: MismatchConfig,
        run_dir: Path,
        *,
        info: Callable[[], dict[str, Any]],
        step: Callable[[], int],
        names: HostNames | None = None,
        ranks: Ranks = ONE_PROCESS,
        checks: Checks | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.block, self.run_dir, self.ranks = block, run_dir, ranks
        self.checks = Checks(True, step) if checks is None else checks
        self._info, self._step = info, step
        self._tell = logger.warning if tell is None else tell
        routing = block.routing
        replays = routing is not None and routing.mode == "R3"
        self.rules = rules_of(block.monitor, names, replays=replays)
        self.alarms = AlarmState()
        self.stopped: str | None = None
        self._looked = False
        self._file = MetricsFile(
            run_dir,
            header=info,
            step=step,
            tell=self._tell,
            writes=ranks.rank == 0,
            begins_another=self._leave_earlier_run,
        )
        self._sampling = SamplingSettings()
        self.sums = Accumulator(ranks)
        self._faults: dict[str, list[Fault]] = {}
        self._reasons_seen: Counter[str] = Counter()  # bad rows of this process's run so far, on all ranks
        self._bad_row_window = BadRowWindow()
        self._too_many: str | None = None
        self._flushes: dict[str, int] = {}
        self._growths: dict[str, Growth] = {}  # of each gap that is asked whether it grows
        self._of_probes: dict[str, float] = {}
        self.evidence: Evidence | None = None
        if ranks.rank == 0:
            ensure_writable(run_dir)
            if block.monitor.evidence:
                self.evidence = Evidence(run_dir, self.event, self._tell)
            self.checks.report_to(self._file.event)

    # The run.

    def begin(self, resume_step: int | None = None) -> None:
        """Open a segment for a training; `resume_step` is the last step of the checkpoint that it resumes.

        If its file cannot be created, the run goes on, and the next line tries again.
        """
        self._file.begin("training", resume_step)
        if self.evidence is not None:
            self.evidence.begin()

    def _leave_earlier_run(self, files: int) -> None:
        """Set the evidence of an earlier run aside, which has so many files in the folder."""
        set_aside(self.run_dir, files)
        logger.warning("%s holds an earlier run; its files stay, and no report reads them.", self.run_dir)

    @contextlib.contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Write an evaluation of the weights after `step` steps as a segment of its own; within another segment, as its part."""
        if self._file.open_segment is not None:
            yield
            return
        self._file.begin("evaluation")
        status, message = "completed", ""
        try:
            yield
        except BaseException as error:
            status, message = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            self._file.end(step, status, message)

    def announce(self) -> None:
        """Print what both sides compute with, which sections are on, and which alarms are watched.

        If this package's loggers show the level INFO, versions and patches are printed too.
        """
        if self.ranks.rank == 0:
            verbose = logger.isEnabledFor(logging.INFO)
            say_in_run(banner(self.block, self._info(), self.rules, self.run_dir, verbose=verbose))

    def end(self, status: str, message: str = "", *, step: int | None = None) -> None:
        """Write what is left and how training ended ("completed" or "failed"; by default with the alarm that stopped it)."""
        if self._file.open_segment != "training":
            return
        at = self._step() if step is None else step
        if self.evidence is not None:
            self.evidence.measured(at)  # no other batch will come
        # With several ranks merging is a collective operation, and after a failure the other ranks may not take part.
        # What was logged last stays: counts of nothing would take the place of that step's own.
        if self.ranks.size == 1 and self.sums.has_observed("train"):
            self.write(at, self.flush("train", at))
        self._file.end(at, status, message or self.stopped or "")
        if self.ranks.rank == 0:
            try:
                say_in_run("\n".join(closing_lines(read_run(self.run_dir))))
            except Exception:  # whatever it is: training has ended well, and what comes after it must not be lost
                logger.warning("The summary of the run cannot be printed.", exc_info=True)

    def event(
        self, level: str, name: str, message: str, data: dict[str, Any] | None = None, *, step: int | None = None
    ) -> None:
        """Write an event of the current step, or of `step`; before the first segment, keep it until that is open."""
        if self.ranks.rank == 0:
            self._file.event(self._step() if step is None else step, level, name, message, data)
        if self.evidence is not None and (name, level) == (WEIGHT_SYNC, "error"):
            self.evidence.await_batch(message)

    # The gap.

    def sampled_with(self, sampling: SamplingSettings) -> None:
        """Set the sampling settings of the tokens that are observed from now on."""
        self._sampling = sampling

    @contextlib.contextmanager
    def refusing(self, split: str, batch: HeldBatch) -> Iterator[None]:
        """Run a check of a batch; if it fails, rows of a training batch are kept as evidence, and the error goes on.

        Only the main process keeps rows, which are its own, and it waits for no other rank.
        """
        try:
            yield
        except MismatchError as error:
            if self.evidence is not None and split == "train":
                self.evidence.keep(batch.step + 1, f"{type(error).__name__}: {error}", batch)
            raise

    @contextlib.contextmanager
    def holding(self, split: str, batch: HeldBatch) -> Iterator[None]:
        """Measure a batch as under `refusing`, and hold it afterwards, so that an alarm of its step can keep rows of it."""
        with self.refusing(split, batch):
            yield
        if self.evidence is not None and split == "train":
            self.evidence.hold(batch)
            self.evidence.measured(batch.step + 1)

    def mask(self, split: str, kept_mask: Tensor, response_mask: Tensor) -> None:
        """Add what a correction leaves of a batch; arguments as for `masked_sums`."""
        self.sums.add(split, "masked", masked_sums(kept_mask, response_mask))

    def count_bad_rows(self, split: str, bad: BadRows, batch: HeldBatch | None = None) -> None:
        """Count the rows of a batch and those that are bad, and keep the first bad rows of training as evidence."""
        self.sums.add(split, "bad_rows", bad.sums())
        firsts = bad.firsts()
        self._faults.setdefault(split, []).extend(firsts)
        if firsts and batch is not None and self.evidence is not None and split == "train":
            messages = " ".join(fault.message for fault in firsts)
            self.evidence.keep(batch.step + 1, messages, batch, most=OF_BAD_ROWS)

    def _flush_bad_rows(self, split: str, step: int, sums: Sums) -> dict[str, float]:
        """Return all ranks' bad rows since the last flush, by reason; say why, and note whether they are too many."""
        faults = self._faults.pop(split, [])
        counts = {reason: int(sums[reason]) for reason in BAD_ROW_REASONS}
        bad = sum(counts.values())
        if bad:
            # Words travel only if there is something to say, which every rank knows from the sums.
            self._tell_of_faults(step, counts, [fault for found in self.ranks.gather(faults) for fault in found])
        if split == "train" and int(sums[ALL]):
            self._bad_row_window = self._bad_row_window.after(step, bad, int(sums[ALL]))
            if self.checks.acts:
                self._too_many = self._bad_row_window.too_many(self.block.monitor.share_of_bad_rows)
        # A reason is logged from its first row on, so that a clean run has no such metrics.
        return {
            BAD_ROWS_METRIC + reason: float(counts[reason]) for reason in BAD_ROW_REASONS if self._reasons_seen[reason]
        }

    def _tell_of_faults(self, step: int, counts: Mapping[str, int], faults: Sequence[Fault]) -> None:
        """Write one message for each reason that has bad rows now, and warn of the first of each."""
        for reason, count in counts.items():
            if not count:
                continue
            first = not self._reasons_seen[reason]
            self._reasons_seen[reason] += count
            message = next((fault.message for fault in faults if fault.reason == reason), BAD_ROW_REASONS[reason])
            left_out = (
                "Their loss weight is 0"
                if self.checks.acts
                else "The config only measures, so that they are trained on"
            )
            sentence = (
                f"{count} bad rows ({reason}) before step {step}, such as: {message} {left_out}; the run goes on."
            )
            self.event("warning", BAD_ROWS, sentence, {"reason": reason, "rows": count}, step=step)
            if first and self.ranks.rank == 0:
                self._tell(f"mismatch: {sentence} mismatch/{BAD_ROWS_METRIC}{reason} counts them.")

    def flush(self, split: str, step: int) -> dict[str, float]:
        """Return a split's metrics since the last flush, over all ranks, with prefix; write its profiles when they are due."""
        sums = over_ranks(self.sums.take(split), self.ranks)
        scalars = self._scalars(sums)
        scalars |= self._flush_bad_rows(split, step, part(sums, "bad_rows"))
        if "tokens" in scalars:  # otherwise no gap was measured, which is no log to draw or to ask for growth
            self._write_profiles(split, step, part(sums, "gap"))
            if split == "train":
                # Where versions are followed, only the numerics part is asked whether it grows.
                scalars |= self._growth_of_gap(step, scalars, "numerics/" if part(sums, "drift") else "")
        return {PREFIX + name: value for name, value in scalars.items()}

    def _scalars(self, sums: Sums) -> dict[str, float]:
        """Return what the sums of a split say, without prefix."""
        truncated = self._sampling.truncates_support
        scalars = gap_metrics(part(sums, "gap"), support_truncated=truncated)
        native = gap_metrics(part(sums, "native"), support_truncated=truncated)
        scalars |= {f"native/{name}": value for name, value in native.items()}
        scalars |= masked_metrics(part(sums, "masked"))
        scalars |= cache_metrics(part(sums, "cache"))
        drift = part(sums, "drift")
        if drift:
            scalars |= drift_metrics(drift, support_truncated=truncated)
        return scalars

    def _write_profiles(self, split: str, step: int, gap: Sums) -> None:
        """Write profiles and a sample of tokens: of each evaluation, and of some logs of training."""
        count = self._flushes.get(split, 0)
        self._flushes[split] = count + 1
        is_due = split != "train" or count % PROFILE_EVERY == 0
        if is_due and self.ranks.rank == 0:
            scatter = gap_sample(gap)
            with self._file.writing():
                file = self._file.opened()
                file.profile(step, gap_profiles(gap), split)
                file.scatter(step, old=scatter["old_logprobs"], rollout=scatter["rollout_logprobs"], split=split)

    def _grown(self, name: str, step: int, gap: float) -> dict[str, float]:
        """Return how much a gap has grown over the last logs."""
        self._growths[name], growth = grown(self._growths.get(name, Growth()), step, gap, name)
        return growth

    def _growth_of_gap(self, step: int, scalars: Mapping[str, float], of: str) -> dict[str, float]:
        """Return how much the gap has grown, in nats and in log-odds; nothing where none was measured."""
        found: dict[str, float] = {}
        if of + "k3_kl" in scalars:
            found |= self._grown("k3", step, scalars[of + "k3_kl"])
        if of + "log_odds_abs_diff_mean" in scalars:
            # Squared, it grows as k3 does, so that the same floor and the same bound hold.
            found |= self._grown("log_odds", step, scalars[of + "log_odds_abs_diff_mean"] ** 2)
        return {of + name: value for name, value in found.items()}

    # A step.

    def log(self, step: int, metrics: Mapping[str, Any], split: str = "train") -> Logged:
        """Write the host's metrics with those measured since the last log, and raise alarms for "train"; on all ranks."""
        measured, stop = self.measured(step, split), None
        if split == "train":
            stop = self.watch(step, {**metrics, **measured})
            measured |= self.raised()
        self.write(step, {**metrics, **measured}, split)
        return Logged(metrics=measured, shown=self.shown(measured), stop=stop)

    def measured(self, step: int, split: str = "train") -> dict[str, float]:
        """Return the metrics of all ranks' tokens observed since the last call; for "train", the failed checks so far too."""
        metrics = self.flush(split, step)
        if split == "train":
            metrics |= {PREFIX + name: value for name, value in self.checks.metrics().items()}
        return metrics

    def raised(self) -> dict[str, float]:
        """Return the number of alarms that are raised, and the growth of the probes' gap, which the main process knows."""
        if self.ranks.rank != 0:
            return {}
        return {ALARMS_RAISED: float(len(self.alarms.raised)), **self._of_probes}

    def shown(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return what consoles and loggers get: of this package's metrics those that the block asks for, and all others."""
        if self.block.monitor.metrics == "all":
            return dict(metrics)
        named = {name for rule in self.rules.values() if rule.named for name in rule.logged}
        return {name: value for name, value in metrics.items() if name in named or _in_short(name)}

    def write(self, step: int, metrics: Mapping[str, Any], split: str = "train") -> None:
        """Write those of the metrics that are numbers, or None."""
        plain = {name: _plain(value) for name, value in metrics.items()}
        numbers = {name: value for name, value in plain.items() if value is None or isinstance(value, (int, float))}
        if self.ranks.rank == 0 and numbers:
            with self._file.writing():
                self._file.opened().step(step, numbers, split)

    def watch(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Raise the alarms of a training log, and return the message of an alarm that stops training; all ranks must call it."""
        return self.decided(self.look(step, metrics))

    def look(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Raise the alarms of a training log in the main process; return the message of one that stops training."""
        stop = None
        if self.ranks.rank == 0:
            with self.checks.checking("alarms"):
                stop = self._watch(step, metrics)
        return stop

    def decided(self, stop: str | None) -> str | None:
        """Return on every rank what `look` returned in the main process; all ranks must call it."""
        if self.ranks.size > 1 and any(rule.action == "stop" for rule in self.rules.values()):
            # A metric may differ between ranks, and if one rank stopped by itself the others would wait for it.
            stops = self.ranks.sum(torch.tensor(float(stop is not None)))
            stop = self.ranks.gather(stop)[0] if bool(stops) else None
        if self._too_many is not None:  # which every rank knows
            stop = stop or self._too_many
            last, *_ = self._bad_row_window.logs[-1]
            self._bad_row_window, self._too_many = BadRowWindow(since=last), None  # a resumed run counts anew
        self.stopped = self.stopped if stop is None else stop
        return stop

    def _watch(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        if not self._looked:
            # Done at the first log, so that the user need not wait for the end of training.
            self._looked = True
            for metric, message in unwatched(self.rules, metrics).items():
                self.event("warning", "unwatched", message, {"metric": metric}, step=step)
                self._tell(message)
        stop = None
        self._of_probes = self._growth_of_probes(step, metrics)
        self.alarms, alarms = watch(self.alarms, {**metrics, **self._of_probes}, self.rules, step)
        kept = self._kept_for([alarm.message for alarm in alarms if alarm.status == "raised"], step)
        for alarm in alarms:
            self.event(alarm.level, ALARM, alarm.message, dataclasses.asdict(alarm), step=step)
            if alarm.status == "raised":
                self._tell(alarm.message if kept is None else f"{alarm.message} {kept.sentence()}")
                kept = None  # it is said once
            if alarm.stops:
                stop = alarm.message
        if self._too_many is not None:
            rows = {"reason": None, "rows": self._bad_row_window.bad}
            self.event("error", BAD_ROWS, self._too_many, rows, step=step)
            self._tell(f"mismatch: {self._too_many}")
        return stop

    def _kept_for(self, alarms: Sequence[str], step: int) -> Kept | None:
        """Keep rows of the batch that alarms were raised about; None if nothing was kept."""
        if self.evidence is None or not alarms:
            return None
        return self.evidence.keep(step, " ".join(alarms))

    def saved(self, checkpoint: Path) -> None:
        """Say which checkpoint an alarm that stops training has saved, and how to examine with it what was kept."""
        if self.stopped is None or self.ranks.rank != 0:
            return
        message, data = f"the alarm that stops training saved {checkpoint}.", {"checkpoint": str(checkpoint)}
        kept = None if self.evidence is None else self.evidence.last
        # Rows of an earlier alarm are of other weights than this checkpoint's.
        if kept is not None and kept.step + 1 >= self._step():
            data |= {"path": str(kept.path), "command": kept.command(checkpoint)}
            message += f" To examine the rows that were kept: {data['command']}"
        self.event("info", EVIDENCE, message, data)
        self._tell(message)

    def _growth_of_probes(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return how much the gap of the probes has grown over the last logs; nothing where no update was verified."""
        gap = _plain(metrics.get(WEIGHT_SYNC_GAP))
        if not isinstance(gap, (int, float)):
            return {}
        return {PREFIX + name: value for name, value in self._grown("weight_sync", step, float(gap)).items()}

    # What a checkpoint holds.

    def begin_anew(self) -> None:
        """Forget the alarms of an earlier training of this trainer; those of a checkpoint are loaded afterwards."""
        self.alarms = AlarmState()
        self.stopped, self._looked = None, False
        self._bad_row_window, self._too_many = BadRowWindow(), None
        self._reasons_seen.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of alarms and log as JSON-able data, under the keys of a checkpoint."""
        log = LogState(
            flushes=dict(self._flushes),
            created=self.sums.created,
            growths=dict(self._growths),
            bad_rows=self._bad_row_window,
            reasons_seen=dict(self._reasons_seen),
        )
        return {"monitor": to_json(self.alarms), "log": to_json(log)}

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continue from a checkpoint of `step`, which may lack parts, and say which alarms begin anew; raises RecordError."""
        self.begin_anew()
        if state.get("log") is not None:
            log = from_json(LogState, state["log"], "log")
            self._flushes = dict(log.flushes)
            self.sums.created = log.created
            self._growths = dict(log.growths)
            self._bad_row_window = log.bad_rows
            self._reasons_seen.update(log.reasons_seen)
        if state.get("monitor") is not None:
            self.alarms, notes = resumed(state["monitor"], self.rules)
            for message, metrics in notes:
                self.event("info", ANEW, message, {"metrics": metrics}, step=step)
                self._tell(message)


def _in_short(name: str) -> bool:
    """Return whether a metric is another's, one of the short list, or a count of failed checks or bad rows."""
    ours = own_name(name)
    return ours is None or ours in SHORT or ours.startswith((METRIC, BAD_ROWS_METRIC))


def _plain(value: Any) -> Any:
    """Return the number in a tensor without dimensions or a numpy scalar, and of a bool; return any other value as it is."""
    value = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    return int(value) if isinstance(value, bool) else value
