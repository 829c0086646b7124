"""Bad rows of a batch: which they are and why, how many there were, and when there are too many of them.

A row is bad if it cannot be trained on: a log-probability is not finite, or what the engine says of it does not fit its tokens.
If the config acts, such a row gets loss weight 0. Other rows keep their gradients, and the batch keeps its denominators.

    bad = BadRows(len(records))
    bad.add(3, "routes", "rollout 3: its routing was recorded of other tokens ...")
    log.count_bad_rows(split, bad)          # metrics `bad_rows/<reason>`; too many of them end an acting run
    loss_weight = (~bad.flags()).float()    # [B]

Shapes: B rows of a batch, T tokens of its longest response.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_ext.errors import MismatchError
from mismatch_ext.events import BAD_ROW_REASONS, BAD_ROWS
from mismatch_ext.states import state
from mismatch_ext.sums import Sums

METRIC = "bad_rows/"
"""Prefix of the metrics that count bad rows since the last log, by reason."""
WINDOW = 20
"""Optimizer steps over which the share of bad rows is taken."""
FEW = 3
"""Fewer bad rows in a window never end a run, whatever their share, unless none is allowed. A choice."""
ALL = "rows"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a row is bad: one of `BAD_ROW_REASONS`, and the message that names row and place."""

    reason: str
    message: str


class BadRows:
    """The bad rows of a batch of `size` rows; of a row's faults the first one stays.

    Attributes:
        size: Number of rows of the batch.
        faults: The fault of each bad row, by the row's number.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.faults: dict[int, Fault] = {}

    def __len__(self) -> int:
        return len(self.faults)

    @property
    def spoil_all(self) -> bool:
        """Whether all rows are bad, and there are enough of them that this is no fault of single rows."""
        return len(self) == self.size and self.size >= FEW

    def add(self, row: int, reason: str, message: str) -> None:
        """Call a row bad; `reason` is one of `BAD_ROW_REASONS`."""
        assert reason in BAD_ROW_REASONS, reason
        self.faults.setdefault(row, Fault(reason=reason, message=message))

    @contextmanager
    def judging(self, row: int, reason: str) -> Iterator[None]:
        """Run a check of one row; if it raises an error of this package, the row is bad."""
        try:
            yield
        except MismatchError as error:
            self.add(row, reason, str(error))

    def add_non_finite(self, reason: str, values: Tensor, mask: Tensor, side: str | None = None) -> None:
        """Call rows bad that have a value which is not finite at a sampled token.

        Args:
            reason: "rollout_logprobs" or "old_logprobs".
            values: Log-probabilities `[B, T]`.
            mask: Which tokens were sampled `[B, T]`.
            side: Whose they are, in the message; None takes the engine or the trainer by the reason.
        """
        if side is None:
            side = "engine" if reason == "rollout_logprobs" else "trainer"
        broken = ~values.isfinite() & mask.bool()
        for row in broken.any(1).nonzero()[:, 0].tolist():
            place = int(broken[row].nonzero()[0])
            message = f"row {row}, token {place}: the {side}'s log-probability is {float(values[row, place])}."
            self.add(row, reason, message)

    def flags(self, device: torch.device | str = "cpu") -> Tensor:
        """Return which rows are bad `[B]`, bool."""
        flags = torch.zeros(self.size, dtype=torch.bool)
        flags[list(self.faults)] = True
        return flags.to(device)

    def sums(self) -> Sums:
        """Return the number of rows, and of those that are bad for each reason."""
        reasons = [fault.reason for fault in self.faults.values()]
        counts = {ALL: self.size} | {reason: reasons.count(reason) for reason in BAD_ROW_REASONS}
        return {name: torch.tensor(float(count), dtype=torch.float64) for name, count in counts.items()}

    def firsts(self) -> list[Fault]:
        """Return the first fault of each reason, by the number of its row."""
        first: dict[str, Fault] = {}
        for _, fault in sorted(self.faults.items()):
            first.setdefault(fault.reason, fault)
        return list(first.values())


@state
class BadRowWindow:
    """The last `WINDOW` steps: of each log the step, the rows that are bad, and all rows.

    Until a run has taken so many steps, the window holds those that it has taken: three bad rows of the first step are enough.
    """

    logs: tuple[tuple[int, int, int], ...] = ()
    since: int = 0
    """The last step before the window."""

    def after(self, step: int, bad: int, rows: int) -> BadRowWindow:
        """Return the window after a log of a step."""
        kept = [log for log in self.logs if log[0] > step - WINDOW]
        forgotten = [log[0] for log in self.logs if log[0] <= step - WINDOW]
        since = max(forgotten, default=self.since)
        return BadRowWindow(logs=(*kept, (step, bad, rows)), since=since)

    @property
    def bad(self) -> int:
        """Number of bad rows in the window."""
        return sum(bad for _, bad, _ in self.logs)

    def too_many(self, share: float) -> str | None:
        """Return why the run has to end if there are more bad rows than a share of all; None if it goes on.

        Without any allowed (`share` 0), one is too many; otherwise fewer than `FEW` never are.
        """
        bad = self.bad
        rows = sum(rows for _, _, rows in self.logs)
        least = FEW if share else 1
        if bad < least or bad <= share * rows:
            return None
        return (
            f"{bad} of the {rows} rows of steps {self.since + 1} to {self.logs[-1][0]} were bad, which is more than "
            f"mismatch.monitor.max_bad_rows={share:g} allows. {BAD_ROWS!r} in metrics-*.jsonl says why each was; "
            "repair the cause, or set another share."
        )
