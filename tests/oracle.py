"""How far float32 is from exact, on one model and its own tokens: what a bound on a float32 gap is made of.

Two float32 implementations differ because each rounds. A bound read off one machine is a bound on that machine's order of
sums; the trainer's own error on the same tokens, against the same weights in float64, is known wherever the test runs.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

# Each side errs about as much as the trainer does (2), and kernels of another order of sums by some times more (4). A fault of
# the plumbing is of a tenth of a nat and more: four to five orders of magnitude above the bound on a mean over a hundred tokens.
FACTOR = 8.0
# On a model that float32 does not determine better than this, agreement in float32 would prove nothing.
USELESS = 1e-3


def expect_float32(steps: list[dict[str, float]], errors: list[float]) -> None:
    """Assert that the gap of each step is what rounding to float32 makes of it.

    The mean, and the root of twice k3, which is the root mean square of small gaps: no single token's rounding decides, and
    one token of a hundred that is wrong by a thousandth of a nat shows in both.

    Args:
        steps: What was logged, with the gap's measures.
        errors: `float32_error` of each batch.
    """
    bound = FACTOR * max(errors)
    means = [step["mismatch/logp_abs_diff_mean"] for step in steps]
    spreads = [(2 * step["mismatch/k3_kl"]) ** 0.5 for step in steps]
    print(f"float32: gap {max(means):.2g}, root mean square {max(spreads):.2g}, own error {max(errors):.2g}")
    assert means and 0 < min(means) and max(means) < bound, (means, bound)
    assert max(spreads) < 2 * bound, (spreads, bound)


def logprobs(model: Any, ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the log-probabilities `[B, T - 1]` of the tokens after the first, in the model's dtype."""
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def float32_error(model: Any, ids: Tensor, attention_mask: Tensor, mask: Tensor) -> float:
    """Return the mean of |float32 - float64| over the log-probabilities of some tokens, in nats.

    Experts are chosen anew in float64. Where that makes another choice, float32 determines no choice, and the bound is wide.

    Args:
        model: In float32, in evaluation mode or without dropout.
        ids: `[B, T]` token ids.
        attention_mask: `[B, T]`, 0 at padding.
        mask: `[B, T]`, true at the tokens that count; the first of a row has no log-probability.

    Raises:
        AssertionError: The model is not in float32, or float32 does not determine its log-probabilities.
    """
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        vars(module).pop("forward", None)  # what trainers put there goes on calling the model that was copied
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # grouped products are not of float64
    wide = logprobs(exact, ids, attention_mask)
    assert wide.dtype == torch.float64
    difference = logprobs(model, ids, attention_mask).double() - wide
    error = float(difference.abs()[mask[:, 1:].bool()].mean())
    assert 0 < error < USELESS, f"float32 is {error:.2g} nats from float64 on this model: no oracle"
    return error


def watch_float32_error(trainer: Any) -> list[float]:
    """Return a list that gets the float32 error of each batch that a TRL trainer generates, on its tokens and weights."""
    errors: list[float] = []
    plain = trainer._generate_and_score_completions

    def measured(inputs: Any) -> Any:
        batch = plain(inputs)
        ids, attention, counted = (
            torch.cat([batch[f"prompt_{name}"] * keep, batch[f"completion_{name}"]], 1)
            for name, keep in (("ids", 1), ("mask", 1), ("mask", 0))
        )
        if counted.any():  # TRL can leave out all responses that were cut at the longest length
            errors.append(float32_error(trainer.accelerator.unwrap_model(trainer.model), ids, attention, counted))
        return batch

    trainer._generate_and_score_completions = measured
    return errors
