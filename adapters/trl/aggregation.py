"""What each token's loss weighs in TRL's loss, by loss type; and TRL's own loss asked for it, on real shapes.

`behavior.py` compares these weights with TRL's loss on made-up rows when a trainer is built, and `prove_weights` does once on the
first micro-batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from mismatch_ext.errors import ConfigError

FAR_BELOW = -1.0e4
"""A reference's log-probability at which the slope of k3 in the policy's is 1: `exp(FAR_BELOW)` is 0."""
PER_STEP = ("cispo", "dapo", "vespo")
"""Loss types that divide by the tokens of a whole optimizer step."""


def mask_of_loss(inputs: Mapping[str, Any]) -> Tensor:
    """Return 1 where a token is trained on, 0 elsewhere `[B, T]`."""
    mask: Tensor = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    return mask


def token_weights(trainer: Any, inputs: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return d loss / d per-token loss of a micro-batch `[B, T]`: positive where tokens are trained on, 0 elsewhere.

    Args:
        trainer: GRPO's, of one of the loss types that `behavior.LOSS_TYPES` lists.
        inputs: The micro-batch.
        dtype: Of the weights.

    Raises:
        KeyError: The loss type is another.
    """
    mask, training = mask_of_loss(inputs).to(dtype), trainer.model.training
    passes = trainer.current_gradient_accumulation_steps if training else 1.0
    of_loss = torch.ones((), dtype=dtype, device=mask.device)
    if trainer.loss_type in PER_STEP:
        # TRL counts the tokens of a generation batch, which may last for several steps.
        tokens: Tensor = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        if training:
            tokens = tokens * passes / trainer.args.steps_per_generation
        return of_loss / tokens * mask
    rows = len(mask)
    of_row = mask.sum(1, keepdim=True).clamp(min=1.0)
    # Divided in the order in which the gradient of TRL's sum comes back, so that the weights are its own to the bit.
    of_loss = of_loss / passes
    if trainer.loss_type == "bnpo":
        return of_loss / mask.sum().clamp(min=1.0) * mask
    if trainer.loss_type == "dr_grpo":
        most_tokens = rows * int(trainer.max_completion_length)
        return of_loss / most_tokens * mask
    of_loss = of_loss / rows
    return {"grpo": of_loss / of_row, "sapo": of_loss / of_row, "luspo": of_loss}[trainer.loss_type] * mask


def prove_weights(weights: Tensor, trainer: Any, model: Any, inputs: Mapping[str, Any]) -> None:
    """Compare the weights of a micro-batch with those of TRL's own loss; raise ConfigError if they differ."""
    found = read_weights(trainer, model, inputs)
    if not torch.allclose(found, weights, rtol=1e-4, atol=0):
        worst = int((found - weights).abs().nan_to_num(nan=torch.inf).argmax())
        raise ConfigError(
            f"the aggregation of loss_type={trainer.loss_type!r} gives a token the weight {float(found.flatten()[worst]):.5g} "
            f"instead of {float(weights.flatten()[worst]):.5g}. Remove what overrides methods that TRL's _compute_loss calls, or "
            "these sections."
        )


def read_weights(trainer: Any, model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Return the weights of a micro-batch's tokens in TRL's own loss `[B, T]`, float32.

    TRL's loss is linear in the per-token loss, so that its derivative is the weight: with the policy term at zero and the KL term
    made linear, on a stand-in for the trainer, whose log stays as it is. TRL's own function is asked, because a subclass's terms
    depend on log-probabilities too.
    """
    mask = inputs["completion_mask"]
    zero = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    logps = zero.clone().requires_grad_()
    stand_in = _stand_in(trainer, logps)
    stand_in.args.use_bias_correction_kl = False
    vars(stand_in).update(beta=1.0, off_policy_mask_threshold=None, top_entropy_quantile=1.0, entropy_coef=0.0)
    with torch.enable_grad():
        loss = GRPOTrainer._compute_loss(stand_in, model, _probe(inputs, zero))
        weights: Tensor = torch.autograd.grad(loss, logps)[0]
    return weights


def _stand_in(trainer: Any, logps: Tensor) -> Any:
    """Return a copy of a trainer whose loss is of given log-probabilities, and leaves the trainer's log as it is."""
    args, accelerator = copy(trainer.args), copy(trainer.accelerator)
    # Not by `copy`, which a class that is pickled may have changed.
    stand_in = object.__new__(type(trainer))
    vars(stand_in).update(vars(trainer))
    entropies = torch.zeros_like(logps)

    def dropped(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        # TRL only logs what it takes over ranks. On the CPU `item` does not wait for a device; NaN shows if a loss reads it.
        return torch.full(tensor.shape, math.nan, device="cpu")

    accelerator.gather = accelerator.reduce = dropped
    vars(stand_in).update(
        args=args,
        accelerator=accelerator,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropies, None),
    )
    return stand_in


def _probe(inputs: Mapping[str, Any], zero: Tensor) -> dict[str, Any]:
    probe = dict(inputs)
    probe["advantages"] = zero[:, 0]
    probe["ref_per_token_logps"] = torch.full_like(zero, FAR_BELOW)
    probe.pop("old_per_token_logps", None)
    probe.pop("sampling_per_token_logps", None)
    if "importance_sampling_ratio" in inputs:
        probe["importance_sampling_ratio"] = torch.ones_like(zero)
    return probe
