"""The one pass over a batch that every correction needs: in numpy on a CPU, in torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_ext.correction.cpu import scan_cpu
from mismatch_ext.correction.rows import Rows, offender, scan_blocks
from mismatch_ext.presets import ResolvedCorrection


def scan(
    rollout: Tensor, old: Tensor, mask: Tensor, settings: ResolvedCorrection, weights: Tensor | None, kept: Tensor
) -> Rows:
    """Return the sums of each row, and write token-level weights and decisions.

    Args:
        rollout: log mu `[B, T]`.
        old: log pi_old `[B, T]`.
        mask: True for tokens `[B, T]`.
        settings: The correction.
        weights: Receives token-level weights `[B, T]`, or None when the level is not `token`.
        kept: Receives the tokens that the token-level rules keep `[B, T]`.

    Raises:
        NonFiniteLogprobError: NaN or infinity in an unmasked position; names tensor, row and position.
    """
    passed = scan_cpu if mask.device.type == "cpu" else scan_blocks
    rows = passed(rollout, old, mask, settings, weights, kept)
    if not bool(torch.isfinite(rows.d).all() & torch.isfinite(rows.old).all()):
        raise offender(rollout, old, mask)
    return rows
