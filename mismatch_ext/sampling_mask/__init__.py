"""Sampling-mask replay: log-probabilities over only the tokens that top-p, top-k and min-p kept (DeepSeek-V3.2).

These tokens are the support S. An engine that truncates samples from pi_S(y) = pi(y) / sum_{v in S} pi(v). If the trainer scores
pi(y), the importance ratio is the mass of S even where both sides agree. If the trainer scores pi_S(y) over the same S, it is 1.
"""

from mismatch_ext.sampling_mask.logprobs import head_logprobs, support_logprobs
from mismatch_ext.sampling_mask.support import TokenSupport, join
from mismatch_ext.sampling_mask.toplogprobs import support_of_top

__all__ = [
    "TokenSupport",
    "head_logprobs",
    "join",
    "support_logprobs",
    "support_of_top",
]
