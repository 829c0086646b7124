"""The handling of a failed check: it is an error under `mismatch.level: enforce`, and a finding under `observe`.

Every check that could end a run is called inside a block of one `Verdicts`:

    with verdicts.checking("weight_sync"):
        checker.raise_for(verdict)

Under `enforce`, the block has no effect. Under `observe`, an exception in the block becomes a finding: it is warned of once,
counted, and written to the run's metrics file. The host's code never runs in such a block.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from mismatch_ext.config import Level
from mismatch_ext.errors import MismatchError
from mismatch_ext.ranks import Ranks

Sink = Callable[..., None]
"""Writes an event: step, level, name, message, data."""
Value = TypeVar("Value")

EVENT = "observed"
"""Name of a finding's event in `metrics.jsonl`."""
METRIC = "observed/"
"""Prefix of the metrics that count findings, by check."""
ALL_WRITTEN = 8
"""Number of a check's first findings that are all written; of later findings, only some are."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A check that failed after that many optimizer steps, in a run that went on, with the error that `enforce` raises."""

    check: str
    step: int
    message: str

    def sentence(self) -> str:
        """Return the finding as a sentence for the user."""
        return f"mismatch.level='observe': {self.check} failed at step {self.step}: {self.message}"


class Verdicts:
    """The checks of one process of a run; `step` returns the number of finished optimizer steps."""

    def __init__(self, level: Level, step: Callable[[], int] | None = None) -> None:
        self.level = level
        self.counts: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._step = step
        self._sink: Sink | None = None
        self._unwritten: list[Finding] = []

    @property
    def observes(self) -> bool:
        """Whether failed checks are findings, and this package must not change what the host computes."""
        return self.level == "observe"

    def at(self, step: Callable[[], int]) -> None:
        """Set the function that returns the number of finished optimizer steps, once there is a run."""
        self._step = step

    def report_to(self, sink: Sink | None) -> None:
        """Write findings to a run's metrics file from now on, those that wait first; with None, let them wait."""
        self._sink = sink
        if sink is not None:
            for finding in self.take():
                self._write(finding)

    @contextmanager
    def checking(self, check: str) -> Iterator[None]:
        """Run a check; under `observe`, an exception becomes a finding, and the run goes on after the block."""
        try:
            yield
        except Exception as error:
            if not self.observes:
                raise
            self.note(check, f"{type(error).__name__}: {error}")

    @contextmanager
    def around(self, check: str, manager: AbstractContextManager[Value]) -> Iterator[Value | None]:
        """Enter a context of ours around the host's code; errors of that code stay errors. Yield None if entering fails."""
        if not self.observes:
            with manager as value:
                yield value
            return
        stack, entered = ExitStack(), None
        with self.checking(check):
            entered = stack.enter_context(manager)
        try:
            yield entered
        except BaseException as error:
            with self.checking(check):
                stack.__exit__(type(error), error, error.__traceback__)
            raise
        with self.checking(check):
            stack.close()

    def note(self, check: str, message: str, *, step: int | None = None) -> None:
        """Note a finding at a step (None: the present one); only under `observe`, where checks do not raise."""
        if step is None:
            step = 0 if self._step is None else self._step()
        self.add([Finding(check=check, step=step, message=message)])

    def add(self, findings: Sequence[Finding], *, warned: bool = False) -> None:
        """Take findings: warn of the first one of each check (unless another process has `warned`); write them now or later."""
        for finding in findings:
            self.counts[finding.check] += 1
            if self.counts[finding.check] == 1 and not warned:
                with contextlib.suppress(Warning):  # a user may turn warnings into errors
                    warnings.warn(finding.sentence(), stacklevel=4)
            if self._sink is None:
                self._unwritten.append(finding)
            else:
                self._write(finding)

    @property
    def unwritten(self) -> tuple[Finding, ...]:
        """Findings that are not in a file yet."""
        return tuple(self._unwritten)

    def take(self) -> list[Finding]:
        """Return the findings that are not in a file yet, and forget them."""
        unwritten, self._unwritten = self._unwritten, []
        return unwritten

    def gather(self, ranks: Ranks) -> None:
        """Bring the findings of all ranks under `observe` to the main process, which writes them; all ranks must call it."""
        if not self.observes or ranks.size == 1:
            return
        for findings in ranks.gather([] if ranks.rank == 0 else self.take()):
            if ranks.rank == 0:
                self.add(findings, warned=True)

    def _write(self, finding: Finding) -> None:
        """Write a finding. If a check fails again and again, write the first few, then only those numbered by a power of two."""
        assert self._sink is not None
        self._written[finding.check] += 1
        count = self._written[finding.check]
        if count > ALL_WRITTEN and count & (count - 1):
            return
        sink, self._sink = self._sink, None  # if writing fails, that failure must not be written too
        try:
            sink(finding.step, "warning", EVENT, finding.sentence(), asdict(finding) | {"count": count})
        except MismatchError as error:
            with contextlib.suppress(Warning):
                warnings.warn(f"mismatch.level='observe': a finding is not in the metrics file: {error}", stacklevel=2)
        finally:
            self._sink = sink

    def metrics(self) -> dict[str, float]:
        """Return the number of findings so far by check, under their metric names without the package's prefix."""
        return {METRIC + check: float(count) for check, count in sorted(self.counts.items())}
