"""How verl's driver and workers tell each other which rows of a batch are bad, and why.

The driver marks rows with the field `BAD`. Workers then ask for neither routes nor masks of these rows. A scoring pass that the
driver has asked to judge its rows returns the field `FAULT` if it finds bad ones.

Shapes: B rows of a batch, N tokens of a micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from mismatch_ext.events import BAD_ROW_REASONS

BAD = "mismatch_bad_row"
"""Field of a batch that has bad rows: of each row one number, 1 if it is bad."""
JUDGED = "mismatch_judged"
"""Entry of a batch whose scoring pass is to say which rows are bad, instead of raising an error."""
FAULT = "mismatch_fault"
"""Field that such a pass returns if there are bad rows: at each token of a sample the number of its fault, 0 if it has none."""


def bad_rows(data: Any) -> list[bool]:
    """Return which rows of a batch the driver has marked as bad."""
    field = data.get(BAD, None)
    if field is None:
        return [False] * len(data)
    return [bool(row.any()) for row in field.unbind()]


def is_judged(data: Any, forward_only: bool) -> bool:
    """Return whether a pass is to say which rows are bad."""
    return forward_only and bool(tu.get_non_tensor_data(data=data, key=JUDGED, default=False))


def marks(flags: list[bool]) -> Tensor:
    """Return the field `BAD` for rows that are bad or not."""
    return torch.nested.as_nested_tensor([torch.tensor([int(flag)]) for flag in flags], layout=torch.jagged)


def number_of(reason: str) -> int:
    """Return the number that stands for a reason in `FAULT`."""
    return list(BAD_ROW_REASONS).index(reason) + 1


def reason_of(number: int) -> str:
    """Return the reason that a number in `FAULT` stands for."""
    return list(BAD_ROW_REASONS)[number - 1]


def warn_of_first(faults: Mapping[int, str]) -> None:
    """Write to this process's log what is wrong with the first of some rows: the driver knows the reason only."""
    if faults:
        warnings.warn(f"mismatch-ext: {next(iter(faults.values()))}", stacklevel=3)


def add_faults(model_output: dict[str, Any], numbers: Tensor, offsets: Tensor) -> None:
    """Add the numbers of faults `[N]` to what a pass returns; a fault that is there already stays."""
    known = model_output.get(FAULT)
    if known is not None:
        numbers = torch.where(known.values() > 0, known.values(), numbers)
    model_output[FAULT] = torch.nested.nested_tensor_from_jagged(numbers, offsets)
