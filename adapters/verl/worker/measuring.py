"""What a rank measures in its part of a batch: the gap in the pass that scores it, lengths, and broken log-probabilities.

verl's driver would have to fetch every token for that. Here each rank looks at its own part where it lies, and sends only a few
kilobytes, and two numbers for each response.

Shapes: B responses of a part, R tokens of these responses one after the other, without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from verl.utils.device import get_device_id, get_device_name
from verl.workers.utils.padding import response_from_nested

from mismatch_ext.errors import MismatchError, RecordError
from mismatch_ext.gap import gap_sums
from mismatch_ext.sums import Sums

ASKED = "mismatch_measure"
"""Entry of a batch that asks for its measurement in the pass that scores it, with `RunLog.part`."""
CPU = torch.device("cpu")
ROLLOUT, MASK = "rollout_log_probs", "response_mask"


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A log-probability that is not a number.

    Args:
        side: "rollout" or "trainer".
        row: Response of the part.
        token: Its place in the response.
        value: What stands there.
    """

    side: str
    row: int
    token: int
    value: float


@dataclass(frozen=True, kw_only=True)
class PartMeasured:
    """What was measured of a part of a batch.

    Args:
        part: Its place among the parts.
        tokens: How many tokens of each response the policy itself sampled.
        lengths: How many tokens each response has, tools' tokens included.
        gap: Sums of `gap_sums`; None where no pass has scored the part.
        broken: The first log-probability that is not a number; then there is no gap.
        error: What else was found wrong with it.
    """

    part: int
    tokens: list[int]
    lengths: list[int]
    gap: Sums | None = None
    broken: Broken | None = None
    error: MismatchError | None = None


def device_of_rank() -> torch.device:
    """Return the device that a rank measures on: its accelerator if that has float64, otherwise the CPU."""
    return torch.device(get_device_id()) if get_device_name() == "cuda" else CPU


def fields_of(data: Any) -> dict[str, Any]:
    """Return the fields of a batch that are measured; read them before a pass, which may take them out."""
    return {name: data.get(name, None) for name in (ROLLOUT, MASK)}


def measured(
    fields: Mapping[str, Any],
    *,
    part: int,
    log_probs: Any = None,
    device: torch.device = CPU,
    sample: int = 0,
    seed: int = 0,
) -> PartMeasured:
    """Look at a part of a batch, and measure its gap where a pass has scored it.

    Args:
        fields: As `fields_of` returns them.
        part: Its place among the parts.
        log_probs: The trainer's log-probabilities of all of its tokens, prompts included, a nested tensor; None without a pass.
        device: Where it is measured; it must have float64.
        sample, seed: As for `gap_sums`; the part's place is added to the seed.
    """
    try:
        return _measured(fields, part, log_probs, device, sample, seed + part)
    except MismatchError as error:
        return PartMeasured(part=part, tokens=[], lengths=[], error=error)


def _measured(
    fields: Mapping[str, Any], part: int, log_probs: Any, device: torch.device, sample: int, seed: int
) -> PartMeasured:
    given, mask = fields[ROLLOUT], fields[MASK]
    if given is None or mask is None:
        raise RecordError(
            f"part {part} of the batch has no {ROLLOUT if given is None else MASK}: the gap is that to the rollout engine's "
            "log-probabilities; set actor_rollout_ref.rollout.calculate_log_probs=True."
        )
    lengths = mask.offsets().diff()
    rows = lengths.tolist()
    _require_rows(ROLLOUT, given, rows, part)
    own, lengths = mask.values().to(device).bool(), lengths.to(device)
    sides = {"rollout": given.values().to(device).float()}
    if log_probs is not None:
        scored = response_from_nested(log_probs, mask)
        _require_rows("log_probs", scored, rows, part)
        sides["trainer"] = scored.values().to(device).float()
    counted = torch.nn.functional.pad(own.cumsum(0), (1, 0))
    ends = lengths.cumsum(0)
    tokens = (counted[ends] - counted[ends - lengths]).tolist()
    for side, values in sides.items():
        bad = (~values.isfinite() & own).nonzero()
        if len(bad):
            place = bad[0, 0]
            row = int(torch.searchsorted(ends, place, right=True))
            token = int(place - ends[row] + lengths[row])
            broken = Broken(side=side, row=row, token=token, value=float(values[place]))
            return PartMeasured(part=part, tokens=tokens, lengths=rows, broken=broken)
    gap = None
    if "trainer" in sides:
        gap = gap_sums(sides["trainer"], sides["rollout"], own, lengths, sample=sample, seed=seed)
    return PartMeasured(part=part, tokens=tokens, lengths=rows, gap=gap)


def _require_rows(name: str, values: Any, rows: list[int], part: int) -> None:
    found = values.offsets().diff().tolist()
    for row, (count, tokens) in enumerate(zip(found, rows, strict=True)):
        if count != tokens:
            raise RecordError(
                f"response {row} of part {part} of the batch has {count} {name} and {tokens} places in {MASK}; the agent loop "
                "must give one of each for every token of a response."
            )
