"""What becomes of a failed check: an error under `mismatch.level: enforce`, a finding under `observe`.

Every check that would end a run goes through one `Verdicts`, at the place where it is called:

    with verdicts.checking("weight_sync"):
        checker.raise_for(verdict)

Under `enforce` that is the call alone. Under `observe` an error of this package is a finding: said once, counted, and written to
the run's metrics file with the step at which the run would have ended. Any other exception there is one of our own measuring; it
ends no run either, and is a finding that says so. What the host raises is never in such a block.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from mismatch_ext.errors import MismatchError

Level = Literal["observe", "enforce"]
Sink = Callable[..., None]
"""Writes an event: step, level, name, message, data."""
Value = TypeVar("Value")

EVENT = "observed"
"""Name of a finding's event in `metrics.jsonl`."""
METRIC = "observed/"
"""How the metrics begin that count findings, by check."""
ENFORCE = "enforce/"
"""How the metrics begin that `enforce` would have had, and that `observe` computes without applying them."""
ALL_WRITTEN = 8
"""Findings of a check of which each is written."""
STOP, APPLY, FAILED = "stop", "apply", "failed"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A check that failed in a run that went on.

    Attributes:
        check: Its name.
        step: Finished optimizer steps.
        kind: `stop` where `enforce` would have ended the run here; `apply` where it would first have set what is not as asked;
            `failed` where our own measuring failed.
        message: The error that `enforce` raises, or what failed.
    """

    check: str
    step: int
    kind: str
    message: str

    def sentence(self) -> str:
        """Return what is said of it."""
        said = {
            STOP: f"enforce would have stopped at step {self.step}",
            APPLY: f"not as asked at step {self.step}; enforce sets it, and stops where it cannot",
            FAILED: f"measurement failed at step {self.step}",
        }
        return f"mismatch.level='observe': {self.check}: {said[self.kind]}: {self.message}"


class Verdicts:
    """The checks of one process of a run.

    Args:
        level: `mismatch.level`.
        step: Returns the number of finished optimizer steps.

    Attributes:
        counts: Findings so far, by check.
    """

    def __init__(self, level: Level, step: Callable[[], int] | None = None) -> None:
        self.level = level
        self.counts: Counter[str] = Counter()
        self._written: Counter[tuple[str, str]] = Counter()
        self._step = step
        self._sink: Sink | None = None
        self._kept: list[Finding] = []

    @property
    def observes(self) -> bool:
        """Whether a failed check is a finding, and nothing that the host computes may be changed."""
        return self.level == "observe"

    def at(self, step: Callable[[], int]) -> None:
        """Say where the number of finished optimizer steps comes from, once there is a run."""
        self._step = step

    def report_to(self, sink: Sink | None) -> None:
        """Write findings to a run's metrics file from here on, those first that came before there was one; None keeps them."""
        self._sink = sink
        if sink is not None:
            for finding in self.take():
                self._write(finding)

    @contextmanager
    def checking(self, check: str, *, applied: bool = False) -> Iterator[None]:
        """Run a check; under `observe` what it raises is a finding, and the run goes on behind the block.

        Args:
            check: Its name, of letters, digits and underscores.
            applied: Whether it is of something that a section sets, and has not set under `observe`.
        """
        try:
            yield
        except Exception as error:
            if not self.observes:
                raise
            kind = FAILED if not isinstance(error, MismatchError) else APPLY if applied else STOP
            self.found(check, f"{type(error).__name__}: {error}", kind=kind)

    @contextmanager
    def around(self, check: str, manager: AbstractContextManager[Value]) -> Iterator[Value | None]:
        """Enter a context of ours around code of the host, whose errors are its own; yield None where entering fails.

        Args:
            check: As for `checking`, of entering and leaving.
            manager: The context.
        """
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

    def found(self, check: str, message: str, *, kind: str = STOP, step: int | None = None) -> None:
        """Note a finding; under `observe` alone, where nothing raises.

        Args:
            check: Name of the check.
            message: What it says.
            kind: As of a `Finding`.
            step: Step that it is of; None for the present one.
        """
        step = self._step() if step is None and self._step is not None else step or 0
        self.add([Finding(check=check, step=step, kind=kind, message=message)])

    def add(self, findings: Sequence[Finding], *, said: bool = False) -> None:
        """Take findings: warn of the first of each check, and write or keep them.

        Args:
            findings: Of this process or of another.
            said: Whether somebody has warned of them already.
        """
        for finding in findings:
            self.counts[finding.check] += 1
            if self.counts[finding.check] == 1 and not said:
                with contextlib.suppress(Warning):  # of a user who turns warnings into errors
                    warnings.warn(finding.sentence(), stacklevel=4)
            if self._sink is None:
                self._kept.append(finding)
            else:
                self._write(finding)

    @property
    def kept(self) -> tuple[Finding, ...]:
        """Findings that no file has got."""
        return tuple(self._kept)

    def take(self) -> list[Finding]:
        """Return the findings that no file has got, and forget them."""
        kept, self._kept = self._kept, []
        return kept

    def _write(self, finding: Finding) -> None:
        """Write a finding; of a check that fails again and again, the first few and then each whose number is a power of two."""
        assert self._sink is not None
        self._written[finding.check, finding.kind] += 1
        count = self._written[finding.check, finding.kind]
        if count > ALL_WRITTEN and count & (count - 1):
            return
        sink, self._sink = self._sink, None  # a file that cannot be written has no line of its own about that
        try:
            sink(finding.step, "warning", EVENT, finding.sentence(), asdict(finding) | {"count": count})
        except MismatchError as error:
            with contextlib.suppress(Warning):
                warnings.warn(f"mismatch.level='observe': a finding is not in the metrics file: {error}", stacklevel=2)
        finally:
            self._sink = sink

    def metrics(self) -> dict[str, float]:
        """Return the findings so far by check, under the names that are logged, without prefix."""
        return {METRIC + check: float(count) for check, count in sorted(self.counts.items())}

    def named(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return metrics of a section under the names that say whether it acted."""
        return {ENFORCE + name: value for name, value in metrics.items()} if self.observes else metrics
