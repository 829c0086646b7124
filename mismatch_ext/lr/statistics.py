"""Statistics of a batch of responses, over all ranks.

Shapes: B responses of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_ext.config import Trigger
from mismatch_ext.drift import numerics_metrics
from mismatch_ext.errors import RecordError
from mismatch_ext.gap import gap_sums
from mismatch_ext.sums import Sums

F_TAU = "f_1.1"
"""Metric that `trigger: f_tau` watches: F at threshold 1.1, because at 2 few tokens are in the tail."""

Reduce = Callable[..., Tensor]
"""Sums a tensor over ranks, called as `reduce(tensor, reduction="sum")`; accelerate's `Accelerator.reduce` is one."""


@dataclass(frozen=True, kw_only=True)
class LengthStatistics:
    """Response lengths of one batch over all ranks; the arguments of a controller's `update` by name.

    Args:
        responses: Number of responses.
        response_length: Mean length in tokens, truncated responses included; None without a response.
        truncated_fraction: Fraction of the responses that were cut off at the length limit; None if unknown.
    """

    responses: int
    response_length: float | None
    truncated_fraction: float | None

    def to_dict(self) -> dict[str, float | None]:
        """Return the statistics as keyword arguments of `LrController.update` or `LrControl.update`."""
        return {
            "responses": self.responses,
            "response_length": self.response_length,
            "truncated_fraction": self.truncated_fraction,
        }


def length_statistics(
    lengths: Tensor, truncated: Tensor | None = None, *, reduce: Reduce | None = None
) -> LengthStatistics:
    """Return mean length and truncated fraction over all ranks, from the responses that each rank holds.

        response_length = sum over ranks of sum_b lengths_b / sum over ranks of B

    Ranks may hold different numbers of responses, or none. Counts are summed as integers, so all ranks get the same numbers
    to the last bit, and therefore the same multiplier. Every rank must call this, and either all or none must give `truncated`.

    Args:
        lengths: Tokens per response of this rank `[B]`, as the trainer counts them; a response cut off at the limit counts
            the tokens that it has.
        truncated: True where a response was cut off at the length limit `[B]`.
        reduce: Sums a tensor over ranks; None takes torch.distributed's default group if it is initialised.

    Raises:
        RecordError: Wrong shape, or a length that is not a whole number >= 0.
    """
    if lengths.dim() != 1:
        raise RecordError(
            f"lengths has shape {tuple(lengths.shape)}; give one number of tokens per response, shape [B]."
        )
    if truncated is not None and truncated.shape != lengths.shape:
        raise RecordError(
            f"truncated has shape {tuple(truncated.shape)}, lengths {tuple(lengths.shape)}; give one flag per response."
        )
    whole = lengths.long()
    wrong = (whole != lengths) | (whole < 0)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise RecordError(f"lengths[{row}] is {lengths[row].item()!r}; a response has a whole number of tokens >= 0.")
    flags = torch.zeros_like(whole) if truncated is None else truncated.to(whole.device).bool().long()
    sums = torch.stack([torch.full_like(whole.sum(), whole.numel()), whole.sum(), flags.sum()])
    responses, tokens, cut = (int(x) for x in (reduce or _sum_over_ranks)(sums, reduction="sum").tolist())
    return LengthStatistics(
        responses=responses,
        response_length=tokens / responses if responses else None,
        truncated_fraction=cut / responses if responses and truncated is not None else None,
    )


def gap_statistics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, reduce: Reduce | None = None
) -> tuple[float, dict[str, float]]:
    """Return the number of tokens of a batch, and the statistics of its gap: k3 and F(1.1), means over these tokens.

    Args:
        old_logprobs: The trainer's log-probabilities at sampling time `[B, T]`.
        rollout_logprobs: The engine's log-probabilities `[B, T]`.
        mask: True at tokens that count `[B, T]`.
        reduce: Sums a tensor over ranks; all ranks must call this, also those without tokens. None if this rank has the whole
            batch.

    Returns:
        Weight and statistics, the arguments of `RateControl.collect`; all 0 if there is no token.
    """
    sums = gap_sums(old_logprobs, rollout_logprobs, mask)
    mine = torch.stack([sums["k3"], sums[F_TAU], sums["tokens"]])
    kl, f_tau, tokens = (mine if reduce is None else reduce(mine.to(old_logprobs.device), reduction="sum")).tolist()
    return tokens, {"mismatch_kl": kl / max(tokens, 1.0), "f_tau": f_tau / max(tokens, 1.0)}


def leading_statistics(
    trigger: Trigger, lengths: Tensor, truncated: Tensor, gap: Mapping[str, float]
) -> dict[str, float | None]:
    """Return the statistics that a trigger needs, from a whole batch that was measured elsewhere.

    Args:
        trigger: The trigger of `mismatch.lr`.
        lengths: Number of tokens of each response that the policy sampled `[B]`.
        truncated: True where a response was cut off at the length limit `[B]`.
        gap: The batch's measures, as `gap_metrics` returns them; empty if they are unknown.

    Returns:
        Arguments of `RateControl.collect`; empty if the trigger needs a gap and `gap` is empty, or needs nothing from a batch.
    """
    if trigger == "response_length":
        return length_statistics(lengths, truncated, reduce=lambda x, reduction: x).to_dict()
    if trigger in ("mismatch_kl", "f_tau") and gap:
        return {"mismatch_kl": gap["k3_kl"], "f_tau": gap[F_TAU]}
    return {}


def numerics_statistics(sums: Sums) -> dict[str, float]:
    """Return the statistics of rollouts that older weights may have sampled: the numerics only, because drift is not mismatch.

    Args:
        sums: Sums from `drift_sums` of the rollouts that the next step learns from.

    Returns:
        Arguments of `RateControl.collect`. If numerics is unknown, `responses` is 0, which makes the batch no measurement.
    """
    numerics = numerics_metrics(sums)
    if numerics is None:
        return {"responses": 0.0}
    _, metrics = numerics
    return {"mismatch_kl": metrics["k3_kl"], "f_tau": metrics[F_TAU]}


def _sum_over_ranks(tensor: Tensor, reduction: str) -> Tensor:
    if dist.is_available() and dist.is_initialized():
        tensor = tensor.clone()
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor
