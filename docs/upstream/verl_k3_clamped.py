"""verl's `low_var_kl` clamps log-ratios to 20 and values to 10: the estimate of the KL that is logged and penalized is biased."""

import torch
from verl.trainer.ppo.core_algos import kl_penalty

PEER = "verl"
REPORTED = "not reported"
WORKAROUND = "`kl.estimator: k3` (mismatch_ext.kl.kl_estimate) clamps nothing"
POLICY = torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64)
REFERENCE = torch.tensor([0.01, 0.01, 0.98], dtype=torch.float64)
EXPECTED = float((POLICY * (POLICY / REFERENCE).log()).sum())


def seen(estimate=lambda policy, reference: kl_penalty(policy, reference, "low_var_kl")) -> float:
    """Return the expectation of the estimator under the policy, which is the KL for k3 as it is defined."""
    return float((POLICY * estimate(POLICY.log(), REFERENCE.log())).sum())


def with_workaround() -> float:
    """Estimate by this package."""
    from mismatch_ext.kl import kl_estimate

    return seen(lambda policy, reference: kl_estimate(logprobs=policy, ref_logprobs=reference, estimator="k3"))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
