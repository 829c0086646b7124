"""verl names a KL penalty `full`, and has none: NotImplementedError at the first loss."""

import torch
from verl.trainer.ppo.core_algos import kl_penalty

PEER = "verl"
REPORTED = "not reported"
WORKAROUND = "`kl.estimator: full` (mismatch_ext.kl.kl_full) is the exact KL of each token, in chunks"
POLICY = torch.tensor([[[2.0, 0.5, -1.0]]]).log_softmax(-1)
REFERENCE = torch.tensor([[[0.1, 0.2, 0.3]]]).log_softmax(-1)
EXPECTED = float((POLICY.exp() * (POLICY - REFERENCE)).sum())


def seen(full=lambda policy, reference: kl_penalty(policy, reference, "full")) -> float | str:
    """Return the KL of one position over three tokens."""
    try:
        return float(full(POLICY, REFERENCE).sum())
    except NotImplementedError:
        return "NotImplementedError"


def with_workaround() -> float | str:
    """Compute it by this package."""
    from mismatch_ext.kl import kl_full

    return seen(lambda policy, reference: kl_full(logits=policy, ref_logits=reference))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
