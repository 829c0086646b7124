"""verl's `low_var_kl` as a loss has the gradient of the forward KL, not of the reverse KL that it estimates."""

import torch
from verl.trainer.ppo.core_algos import kl_penalty

PEER = "verl"
REPORTED = "https://github.com/verl-project/verl/pull/2953"
WORKAROUND = "`kl.estimator: k3` (mismatch_ext.kl.kl_terms) has the gradient of the KL; verl's own switch is `k3+`"
LOGITS = torch.tensor([2.0, 0.5, -1.0, -1.5], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.3, 0.1, 0.2], dtype=torch.float64).log_softmax(0)
EXPECTED = 0.0


def gradient(loss) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    loss(logits.log_softmax(0)).backward()
    return logits.grad


def seen(term=lambda policy: kl_penalty(policy, REFERENCE, "low_var_kl")) -> float:
    """Return the relative error of the expected gradient, by enumeration of the four tokens."""
    exact = gradient(lambda policy: (policy.exp() * (policy - REFERENCE)).sum())
    sampled = gradient(lambda policy: (policy.detach().exp() * term(policy)).sum())
    return float((sampled - exact).norm() / exact.norm())


def with_workaround() -> float:
    """Take this package's term."""
    from mismatch_ext.config import KlConfig
    from mismatch_ext.kl import kl_terms

    config = KlConfig(estimator="k3", coef=1.0, target="token", baseline="none")
    mask = torch.ones(4, 1)
    return seen(
        lambda policy: kl_terms(
            logprobs=policy[:, None], ref_logprobs=REFERENCE[:, None], mask=mask, settings=config
        ).loss[:, 0]
    )


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
