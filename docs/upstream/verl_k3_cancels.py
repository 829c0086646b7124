"""verl's `low_var_kl` is exp(d) - d - 1 in float32, which is 0 or rounding for the gaps of uniform FP16 and float32."""

import torch
from verl.trainer.ppo.core_algos import kl_penalty

PEER = "verl"
REPORTED = "not reported"
WORKAROUND = "`mismatch/k3_kl` and `kl.estimator: k3` (mismatch_ext.kl.kl_estimate) take expm1 in float64"
GAP = 1e-4
EXPECTED = GAP * GAP / 2


def seen(estimate=lambda policy, reference: kl_penalty(policy, reference, "low_var_kl")) -> float:
    """Return the estimate for a log-ratio of 1e-4 between float32 log-probabilities."""
    zero = torch.zeros(1)
    return float(estimate(zero, zero + GAP))


def with_workaround() -> float:
    """Estimate by this package."""
    from mismatch_ext.kl import kl_estimate

    return seen(
        lambda policy, reference: kl_estimate(logprobs=policy.double(), ref_logprobs=reference.double(), estimator="k3")
    )


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
