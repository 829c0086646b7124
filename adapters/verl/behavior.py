"""Whether a run's policy loss multiplies by a correction's weights, asked when a worker starts: no name of a loss can tell."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from mismatch_ext.adapters.verl.loss import WEIGHTS
from mismatch_ext.adapters.verl.refusals import POLICY_LOSS
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.losses import ppo_loss

from mismatch_ext.errors import ConfigError
from mismatch_ext.rng import forked_rng

PROMPTS, RESPONSES = (2, 1, 3), (4, 2, 3)
RANKS, TOKENS, SAMPLES = 2, 20, 6
"""Data-parallel ranks, and tokens and samples of the global batch of which the made-up rows are a part."""


def check_weights(config: Any) -> None:
    """Refuse a run whose policy loss keeps a token's slope under another weight; raises ConfigError.

    Warns if that loss, with the actor's configuration, fails on the made-up rows.
    """
    device = torch.device(get_device_id())
    wave = torch.sin(1.3 * torch.arange(1.0, sum(RESPONSES) + 1, device=device))
    # Their mirror image has the same mean, for a loss that takes that alone, and crosses 1 everywhere, for one that clips there.
    weights, old = 1 - 0.5 * (wave - wave.mean()), -2 + 0.4 * wave
    config = replace(config, use_kl_loss=False, global_batch_info={})
    name, slopes = config.policy_loss.loss_mode, list[Tensor]()
    function = get_policy_loss_fn(name)  # a name that nobody registered is verl's to refuse
    what = f"{POLICY_LOSS}.loss_mode={name!r} with mismatch.correction: {function.__module__}.{function.__qualname__}"
    try:
        for given in (weights, weights, 2 - weights):
            policy = old.clone().requires_grad_()  # at ratio 1 no bound clips, however narrow
            with forked_rng(device):  # all draw the same numbers, as those losses do that choose tokens at random
                loss, _ = ppo_loss(config, *_made_up(policy, old, 0.5 + wave, {WEIGHTS: given}))
            slopes += torch.autograd.grad(loss, policy)
    except Exception as error:  # noqa: BLE001 - whatever it is: one that made-up rows do not suit may suit the run's
        warnings.warn(
            f"{what} cannot be tried on {len(RESPONSES)} rows of lengths {', '.join(map(str, RESPONSES))}: "
            f"{type(error).__name__}: {error}. Make sure that it multiplies each token's term by its {WEIGHTS}.",
            stacklevel=2,
        )
        return
    first, again, other = slopes
    if not (torch.stack(slopes).isfinite().all() and torch.isclose(first, again, 1e-3, 0).all()):
        found = "is not finite or not repeatable, so that nothing shows whether it would be corrected"
    elif (torch.isclose(first, other, 1e-3, 0) & (first != 0)).any():
        found = "has tokens with the same slope for two weights, so that they would not be corrected"
    else:
        return
    raise ConfigError(
        f"{what}, on made-up rows, {found}; allowed: a loss that multiplies each token's term by its {WEIGHTS}. Let it do so, or "
        "choose another, such as 'vanilla', or a correction that only rejects (level='none' with reject)."
    )


def _made_up(policy: Tensor, old: Tensor, advantages: Tensor, weights: dict[str, Tensor]) -> tuple[Any, TensorDict]:
    """Return what verl's engine gives its loss of made-up rows: the model's output, and the micro-batch."""
    device = policy.device
    fields = {"old_log_probs": old, "advantages": advantages, "ref_log_prob": old - 1, "rollout_log_probs": old + 1}
    data = TensorDict(
        {
            "prompts": _rows(torch.arange(sum(PROMPTS), device=device), PROMPTS),
            "responses": _rows(torch.arange(sum(RESPONSES), device=device), RESPONSES),
            "input_ids": _rows(torch.arange(sum(PROMPTS + RESPONSES), device=device), _lengths()),
            "response_mask": _rows(torch.ones(sum(RESPONSES), dtype=torch.int64, device=device), RESPONSES),
            **{name: _rows(values, RESPONSES) for name, values in (fields | weights).items()},
        },
        batch_size=len(PROMPTS),
    )
    tu.assign_non_tensor(data, dp_size=RANKS, batch_num_tokens=TOKENS, global_batch_size=SAMPLES)
    # The token at a place is scored by the row before it.
    parts = zip(PROMPTS, policy.split(RESPONSES), strict=True)
    scores = torch.cat([torch.cat([old.new_zeros(prompt - 1), row, old.new_zeros(1)]) for prompt, row in parts])
    return {"log_probs": _rows(scores, _lengths())}, data


def _lengths() -> list[int]:
    return [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


def _rows(values: Tensor, lengths: Any) -> Tensor:
    return torch.nested.as_nested_tensor(list(values.split(list(lengths))), layout=torch.jagged)
