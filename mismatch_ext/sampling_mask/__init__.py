"""Sampling-mask replay: log-probabilities over the tokens that top-p, top-k and min-p left to sample from (DeepSeek-V3.2).

An engine that truncates draws from pi_S(y) = pi(y) / sum_{v in S} pi(v). A trainer that scores pi(y) finds a ratio of the mass
of S where the two sides agree; scored over the same S the ratio is 1.
"""

from mismatch_ext.sampling_mask.logprobs import head_logprobs, support_logprobs
from mismatch_ext.sampling_mask.support import TokenSupport, join
from mismatch_ext.sampling_mask.toplogprobs import support_of_top
from mismatch_ext.sampling_mask.truncation import mass_error, support_bounds, truncated_support

__all__ = [
    "TokenSupport",
    "head_logprobs",
    "join",
    "mass_error",
    "support_bounds",
    "support_logprobs",
    "support_of_top",
    "truncated_support",
]
