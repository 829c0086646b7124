"""Times importance correction against verl 0.9.1's own function: both give the same weights, mask and metrics."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from benchmarks.harness import paired
from mismatch_ext.correction import correct
from mismatch_ext.presets import PRESETS

BATCH, LENGTH = 256, 8192
# verl computes both in float32; a sum over a million tokens is accurate to about this relative error.
TOLERANCE = 2e-4


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rollout and old log-probabilities, and the int64 mask that verl's trainer passes."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTH // 4, LENGTH + 1, (BATCH,), generator=generator)
    mask = torch.arange(LENGTH) < lengths[:, None]
    old = -3 * torch.rand(BATCH, LENGTH, generator=generator)
    difference = 0.02 * torch.randn(BATCH, LENGTH, generator=generator)
    difference[torch.rand(BATCH, LENGTH, generator=generator) < 1e-3] *= 50
    return old - difference, old, mask.long()


def run() -> list[dict[str, Any]]:
    """Return the rows of this benchmark."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as verl_correct

    rollout, old, mask = data()
    # At these reciprocal bounds verl's rule, which compares 1/rho, is the same as ours.
    settings = PRESETS["decoupled_geo_rs_token_tis"]

    def ours() -> Any:
        return correct(old_logprobs=old, rollout_logprobs=rollout, response_mask=mask, config=settings)

    def theirs() -> Any:
        return verl_correct(old, rollout, mask, "token", 2.0, False, "seq_mean_k1", "0.999_1.001")

    mine, (proto, verl_mask, verl_metrics) = ours(), theirs()
    assert torch.equal(mine.mask, verl_mask.bool())
    assert torch.allclose(mine.weights, proto.batch["rollout_is_weights"], rtol=1e-5, atol=1e-6)
    names = {name.removeprefix("rollout_corr/"): value for name, value in verl_metrics.items()}
    missing = set(names) - set(mine.metrics)
    assert not missing, missing
    for name, value in names.items():
        assert abs(mine.metrics[name] - value) <= TOLERANCE * max(abs(value), 1e-2), (name, mine.metrics[name], value)
    return [
        paired(
            f"token TIS, seq_mean_k1 rejection, {len(names)} metrics of [{BATCH}, {LENGTH}], {int(mask.sum())} tokens, vs verl",
            ours,
            theirs,
            equal=f"the mask exactly, weights to 1e-5, all {len(names)} metrics to {TOLERANCE:.0e}",
            repeats=9,
        )
    ]
