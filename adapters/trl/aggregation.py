"""The weight that TRL's own loss gives to each token, obtained by differentiating that loss.

Each `loss_type` divides by something different: lengths, tokens of the generation batch, a constant, gradient-accumulation steps.
Terms that are added to TRL's loss must be divided by the same. Instead of retyping eight formulas, this module differentiates
TRL's `_compute_loss`: the loss is linear in the per-token loss, so its derivative is the weight. It always calls TRL's own
function, never a subclass's, because the terms of a subclass depend on log-probabilities too and are not part of the weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.errors import ConfigError

OwnLoss = Callable[[Any, Any, Any], Tensor]
"""TRL's `GRPOTrainer._compute_loss`, unbound: called with trainer, model and micro-batch."""

# exp(ref - logp) is exactly 0 here, so that the derivative of TRL's k3 term is exactly 1.
FAR_BELOW = -1.0e4


def read_aggregation(trainer: Any, own_loss: OwnLoss, model: Any, inputs: Any) -> Tensor:
    """Return d loss / d per_token_loss of a micro-batch `[B, T]`, float32: positive where tokens are trained on, 0 elsewhere.

    It is read off TRL's loss with the policy term at zero and the KL term made linear, on a shallow copy of the trainer, so that
    neither the trainer nor its log is touched.
    """
    completion_mask = inputs["completion_mask"]
    zero = torch.zeros(completion_mask.shape, dtype=torch.float32, device=completion_mask.device)
    logps = zero.clone().requires_grad_()
    args, accelerator, stand_in = copy(trainer.args), copy(trainer.accelerator), copy(trainer)
    args.use_bias_correction_kl = False
    # What TRL logs over ranks is dropped, and costs no collective.
    accelerator.gather = accelerator.reduce = lambda tensor, *_, **__: tensor
    vars(stand_in).update(
        args=args,
        accelerator=accelerator,
        beta=1.0,
        aux_loss_enabled=False,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        entropy_coef=0.0,
        use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, zero, None),
    )
    with torch.enable_grad():
        loss = own_loss(stand_in, model, _probe(inputs, zero))
        weights: Tensor = torch.autograd.grad(loss, logps)[0]
    chosen = (completion_mask * inputs.get("tool_mask", 1)).bool()
    if not bool(torch.where(chosen, weights > 0, weights == 0).all()):
        raise ConfigError(
            f"the aggregation of loss_type={trainer.loss_type!r} gives trained tokens weights from "
            f"{min(weights[chosen].tolist(), default=None)} and masked tokens up to "
            f"{max(weights[~chosen].abs().tolist(), default=None)}; allowed: positive and 0. Remove what overrides methods that "
            "TRL's _compute_loss calls, or mismatch.kl and mismatch.correction."
        )
    return weights


def _probe(inputs: Mapping[str, Any], zero: Tensor) -> dict[str, Any]:
    probe = dict(inputs)
    probe["advantages"] = zero[:, 0]
    probe["ref_per_token_logps"] = torch.full_like(zero, FAR_BELOW)
    probe.pop("old_per_token_logps", None)
    probe.pop("sampling_per_token_logps", None)
    if "importance_sampling_ratio" in inputs:
        probe["importance_sampling_ratio"] = torch.ones_like(zero)
    return probe
