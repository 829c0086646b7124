"""What a failed check does: it ends a run whose config acts, and is counted and warned of in a run that is only measured.

Every check that could end a run is called inside a block of one `Checks`:

    with checks.checking("weight_sync"):
        checker.raise_for(verdict)

If the config acts, the block has no effect. Otherwise an error is caught, be it of this package, of an engine, or a bug. It
is warned of once, counted, and written to the run's metrics file. The host's code never runs in such a block, so that its errors
stay errors.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

from mismatch_ext.errors import MismatchError
from mismatch_ext.events import CHECK_FAILED
from mismatch_ext.ranks import Ranks

Sink = Callable[..., None]
"""Writes an event: step, level, name, message, data."""
Value = TypeVar("Value")

METRIC = "checks_failed/"
"""Prefix of the metrics that count failed checks, by name."""
ALL_WRITTEN = 8
"""Number of a check's first failures that are all written; of later ones, only some are."""


@dataclass(frozen=True, kw_only=True)
class FailedCheck:
    """A check that failed after that many optimizer steps, in a run that went on, with the error that ends an acting run."""

    check: str
    step: int
    message: str

    def sentence(self) -> str:
        """Return it as a sentence for the user."""
        return f"mismatch: the check {self.check!r} failed at step {self.step}; the run goes on. {self.message}"


class Checks:
    """The checks of one process of a run; `step` returns the number of finished optimizer steps.

    Attributes:
        acts: Whether the config changes training or may end it, so that a failed check is an error.
        counts: How often each check failed.
    """

    def __init__(self, acts: bool, step: Callable[[], int] | None = None) -> None:
        self.acts = acts
        self.counts: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._step = step
        self._sink: Sink | None = None
        self._unwritten: list[FailedCheck] = []
        self._since_gathered: Counter[tuple[str, int]] = Counter()  # failures by check and step

    def at(self, step: Callable[[], int]) -> None:
        """Set the function that returns the number of finished optimizer steps, once there is a run."""
        self._step = step

    def report_to(self, sink: Sink | None) -> None:
        """Write failures to a run's metrics file from now on, those that wait first; with None, let them wait."""
        self._sink = sink
        if sink is not None:
            for failed in self.take():
                self._write(failed)

    @contextmanager
    def checking(self, check: str) -> Iterator[None]:
        """Run a check; if the config does not act, its error is noted, and the run goes on after the block."""
        try:
            yield
        except Exception as error:
            if self.acts:
                raise
            # A config that only measures ends nothing, not even if this package or a peer of another version is at fault.
            self.note(check, f"{type(error).__name__}: {error}")

    @contextmanager
    def reporting(self, check: str) -> Iterator[None]:
        """Run a check that ends no run, not even one whose config acts: its error is noted."""
        try:
            yield
        except MismatchError as error:
            self.note(check, f"{type(error).__name__}: {error}")

    @contextmanager
    def around(self, check: str, manager: AbstractContextManager[Value]) -> Iterator[Value | None]:
        """Enter a context of ours around the host's code; errors of that code stay errors. Yield None if entering fails."""
        if self.acts:
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
        """Note that a check failed at a step (None: the present one), in a run that goes on."""
        if step is None:
            step = 0 if self._step is None else self._step()
        self.add([FailedCheck(check=check, step=step, message=message)])

    def add(self, failures: Sequence[FailedCheck], *, warned: bool = False) -> None:
        """Take failures: warn of the first of each check (unless another process has `warned`); write them now or later."""
        for failed in failures:
            self.counts[failed.check] += 1
            self._since_gathered[failed.check, failed.step] += 1
            if self.counts[failed.check] == 1 and not warned:
                with contextlib.suppress(Warning):  # a user may turn warnings into errors
                    warnings.warn(failed.sentence(), stacklevel=4)
            if self._sink is None:
                self._unwritten.append(failed)
            else:
                self._write(failed)

    @property
    def unwritten(self) -> tuple[FailedCheck, ...]:
        """Failures that are not in a file yet."""
        return tuple(self._unwritten)

    def take(self) -> list[FailedCheck]:
        """Return the failures that are not in a file yet, and forget them."""
        unwritten, self._unwritten = self._unwritten, []
        return unwritten

    def gather(self, ranks: Ranks) -> None:
        """Bring the failures of all ranks to the main process, which writes them; all ranks must call it.

        A check that all ranks ran together has failed once, although each of them noted it: of each check and step as many
        failures count as the rank with the most has. Nothing travels if the config acts, because a failed check is an error
        then.
        """
        if self.acts or ranks.size == 1:
            return
        mine = [] if ranks.rank == 0 else self.take()
        told = ranks.gather(mine) if bool(ranks.sum(torch.tensor(float(len(mine))))) else []
        for failures in told:
            of_rank: Counter[tuple[str, int]] = Counter()
            for failed in failures:
                key = (failed.check, failed.step)
                of_rank[key] += 1
                if ranks.rank == 0 and of_rank[key] > self._since_gathered[key]:
                    self.add([failed], warned=True)
        self._since_gathered.clear()

    def _write(self, failed: FailedCheck) -> None:
        """Write a failure. If a check fails again and again, write the first few, then only those numbered by a power of two."""
        assert self._sink is not None
        self._written[failed.check] += 1
        count = self._written[failed.check]
        is_power_of_two = count & (count - 1) == 0
        if count > ALL_WRITTEN and not is_power_of_two:
            return
        sink, self._sink = self._sink, None  # if writing fails, that failure must not be written too
        try:
            sink(failed.step, "warning", CHECK_FAILED, failed.sentence(), asdict(failed) | {"count": count})
        except MismatchError as error:
            with contextlib.suppress(Warning):
                warnings.warn(f"mismatch: a failed check is not in the metrics file: {error}", stacklevel=2)
        finally:
            self._sink = sink

    def metrics(self) -> dict[str, float]:
        """Return how often each check failed so far, under the names of metrics without the package's prefix."""
        return {METRIC + check: float(count) for check, count in sorted(self.counts.items())}
