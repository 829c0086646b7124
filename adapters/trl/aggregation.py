"""The weight that TRL's own loss gives to each token, read off TRL's own code.

Every `loss_type` divides by something else: lengths, tokens of the generation batch, a constant, gradient-accumulation steps.
Terms that are added to TRL's loss must be divided by the same. Rather than retype eight formulas, TRL's `_compute_loss` is
differentiated: the loss is linear in the per-token loss, so its derivative is the weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# exp(ref - logp) is exactly 0 here, so that the derivative of TRL's k3 term is exactly 1.
FAR_BELOW = -1.0e4


@contextmanager
def overridden(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object for the time of a block."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def token_weights(trainer: Any, compute_loss: Callable[[Mapping[str, Any], Tensor], Tensor], inputs: Any) -> Tensor:
    """Return d loss / d per_token_loss `[B, T]` of a micro-batch, by TRL's own aggregation.

    The policy term is zeroed and the KL term made linear, so that nothing but the aggregation is left.

    Args:
        trainer: The GRPOTrainer.
        compute_loss: Runs TRL's `_compute_loss` on inputs, with the given tensor `[B, T]` as the current log-probabilities.
        inputs: The micro-batch, as TRL's `_compute_loss` gets it.

    Returns:
        Weights `[B, T]`, float32, 0 where the mask is 0.
    """
    mask = inputs["completion_mask"]
    zero = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    probe = dict(inputs)
    probe["advantages"] = zero[:, 0]
    probe["ref_per_token_logps"] = torch.full_like(zero, FAR_BELOW)
    probe.pop("old_per_token_logps", None)
    probe.pop("sampling_per_token_logps", None)
    if "importance_sampling_ratio" in inputs:
        probe["importance_sampling_ratio"] = torch.ones_like(zero)
    with (
        torch.enable_grad(),
        overridden(
            trainer,
            beta=1.0,
            aux_loss_enabled=False,
            off_policy_mask_threshold=None,
            top_entropy_quantile=1.0,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        ),
        overridden(trainer.args, use_bias_correction_kl=False),
    ):
        logps = zero.clone().requires_grad_()
        (weights,) = torch.autograd.grad(compute_loss(probe, logps), logps)
    return weights
