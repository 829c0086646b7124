"""What verl's own loss and engine do with made-up inputs, asked when a worker starts: neither a version nor a text can tell.

The block's terms are added to verl's loss and weighed as it weighs its own, and the weights of a correction are to multiply it.
Routes and masks are laid out as its engine lays tokens out. All is asked in a few milliseconds. What a pass did with them is
shown by the pass itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from mismatch_ext.adapters.verl.loss import WEIGHTS, weighs
from mismatch_ext.adapters.verl.refusals import POLICY_LOSS
from mismatch_ext.adapters.verl.replay import PassLayout
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, SeamError
from mismatch_ext.rng import forked_rng
from mismatch_ext.seams import named
from mismatch_ext.versions import PEERS, installed

PROMPTS, RESPONSES = (2, 1, 3), (4, 2, 3)
RANKS, TOKENS, SAMPLES = 2, 20, 6
"""Data-parallel ranks, and tokens and samples of the global batch of which the made-up rows are a part."""


def check_loss(block: MismatchConfig, config: Any) -> None:
    """Refuse sections in the actor's loss if verl's, with the actor's configuration, does not take them.

    Raises SeamError if verl's loss is not the one that was run, and ConfigError if the run's policy loss ignores the weights of
    the correction. Warns if that loss fails on the made-up rows.
    """
    mode = str(config.loss_agg_mode)
    try:
        seen = _computed(mode, weighed=weighs(block))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was seen
        seen = {"raises": f"{type(error).__name__}: {error}"}
    wrong = {name: value for name, value in seen.items() if isinstance(value, str) or not abs(value) < 1e-5}
    if wrong:
        what, value = next(iter(wrong.items()))
        found = f"it {what} {value}" if isinstance(value, str) else f"{what} is off by {value:.6f}"
        raise _refused(block, ("kl", "correction"), f"ppo_loss with loss_agg_mode={mode!r}: on made-up rows {found}")
    if weighs(block):
        _check_weights(config)


def _check_weights(config: Any) -> None:
    """Refuse a run whose policy loss keeps a token's slope under another weight; raises ConfigError."""
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


def _computed(mode: str, *, weighed: bool) -> dict[str, Any]:
    """Return how far off verl's loss, its slope, and its mean of a term are from PPO's formula at ratios that are not clipped."""
    wave = torch.sin(1.3 * torch.arange(1.0, sum(RESPONSES) + 1))
    advantages, old = 0.5 + wave, -2 + 0.4 * wave
    policy = (old + 0.1 * torch.cos(2.1 * torch.arange(1.0, sum(RESPONSES) + 1))).requires_grad_()
    weights = 1 - 0.5 * wave if weighed else torch.ones_like(wave)
    output, data = _made_up(policy, old, advantages, {WEIGHTS: weights} if weighed else {})
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, use_kl_loss=False
    )
    loss, _ = ppo_loss(config, output, data)
    (slope,) = torch.autograd.grad(loss, policy)
    term = -advantages * (policy - old).exp() * weights
    wanted = _mean(term, mode)
    (slope_wanted,) = torch.autograd.grad(wanted, policy)
    mask = data["response_mask"].to_padded_tensor(0).bool()
    shared = agg_loss(_rows(term.detach(), RESPONSES).to_padded_tensor(9.0), mask, mode, RANKS, TOKENS, SAMPLES, None)
    return {
        "the loss": float(loss - wanted),
        "its slope": float((slope - slope_wanted).abs().max()),
        "the mean of a term (agg_loss)": float(shared - wanted),
    }


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


def _mean(term: Tensor, mode: str) -> Tensor:
    """Return what a rank adds to a term of the global batch, by its definition."""
    rows = term.split(RESPONSES)
    if mode.startswith("token-"):
        return RANKS * term.sum() / (TOKENS if mode == "token-mean" else 1)
    of_rows = torch.stack([row.mean() if mode == "seq-mean-token-mean" else row.sum() for row in rows])
    return RANKS * of_rows.sum() / SAMPLES / (max(RESPONSES) if mode == "seq-mean-token-sum-norm" else 1)


def check_layout(prepare: Callable[[Any], Any], packed: bool, block: MismatchConfig) -> None:
    """Refuse routes and masks if verl's engine lays tokens out in another way; raises SeamError.

    `prepare` is `prepare_model_inputs` of verl's own engine, which begins no replay; `packed` says whether it packs tokens into
    one row.
    """
    ids = torch.arange(3, 3 + sum(_lengths()), device=get_device_id())
    places = torch.cat([torch.arange(count) for count in _lengths()]).to(ids.device)
    micro_batch = TensorDict(
        {"input_ids": _rows(ids, _lengths()), "position_ids": _rows(places, _lengths())}, batch_size=len(PROMPTS)
    )
    tu.assign_non_tensor(micro_batch, temperature=1.0, use_remove_padding=packed)
    try:
        inputs, output_args = prepare(micro_batch)
        seen = inputs["input_ids"].flatten()
        layout = PassLayout.of(micro_batch, output_args)
        wanted, real = layout.rows(ids, 0), layout.rows(torch.ones_like(ids), 0).bool()
        if len(seen) == len(wanted) and torch.equal(seen[real], wanted[real]):
            return
        what = f"lays {ids.tolist()} out as {seen.tolist()}, not as {wanted.tolist()}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was seen
        what = f"raises {type(error).__name__}: {error}"
    raise _refused(block, ("routing", "sampling_mask"), f"prepare_model_inputs {what}")


def _lengths() -> list[int]:
    return [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


def _rows(values: Tensor, lengths: Any) -> Tensor:
    return torch.nested.as_nested_tensor(list(values.split(list(lengths))), layout=torch.jagged)


def _refused(block: MismatchConfig, sections: tuple[str, ...], what: str) -> SeamError:
    features = [feature for feature in block.features if feature.partition(".")[0] in sections]
    version, mine = installed("verl"), " and ".join(dict.fromkeys(feature.partition(".")[0] for feature in features))
    return SeamError(
        f"{named(features)}: verl {version} does not do what this release was run with: {what}. Remove {mine} from the block, or "
        f"install a version that was run (pip install verl=={PEERS['verl'].nearest(version)})."
    )
