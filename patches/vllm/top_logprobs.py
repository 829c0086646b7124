"""Keep the most likely tokens that truncation left as numbers; vLLM makes an object and a text of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from typing import Any

from mismatch_ext.errors import PatchDriftError, PatchVersionError
from mismatch_ext.patching import Patch, PatchSet
from mismatch_ext.sampling_mask.toplogprobs import LeftTokens


class SampledLogprobs(list[Any]):
    """A request's log-probabilities of the sampled tokens, as vLLM lists them.

    Attributes:
        left: The tokens that were left to sample from at each sampled token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left = LeftTokens()


def _make(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def update(self: Any, logprobs_lists: Any) -> None:
        asked = self.num_logprobs or 0
        if asked > 0 and type(self.logprobs) is list and not self.logprobs:
            self.logprobs = SampledLogprobs()
        if isinstance(self.logprobs, SampledLogprobs):
            # All requests of a step have as many columns as the one that asked for most; the sampled token has the first column.
            ids, logprobs = logprobs_lists.logprob_token_ids, logprobs_lists.logprobs
            self.logprobs.left.take(ids[:, : asked + 1], logprobs[:, : asked + 1])
            logprobs_lists = logprobs_lists._replace(logprob_token_ids=ids[:, :1], logprobs=logprobs[:, :1])
        return original(self, logprobs_lists)

    return update


TOP_LOGPROBS = Patch(
    name="vllm/top_logprobs",
    peer="vllm",
    supports=">=0.24.0,<=0.32.0",
    target="vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
    make=_make,
    source_digests={"0d86bde8f1cc4a93": "0.24.0 to 0.30.0", "51deea0e95a2585e": "0.31.0 and 0.32.0"},
    upstream="https://github.com/vllm-project/vllm/blob/v0.30.0/vllm/v1/engine/logprobs.py",
    reason=(
        "vLLM makes an object and a text of each most likely token that it is asked for, and TRL sorts these and copies them: of "
        "24 for a sampled token that was half of a small step's time. Sampling masks need ids alone, and of those that are left."
    ),
    not_covered=(
        "`flat_logprobs` and requests of all log-probabilities, which stay as they are, and the engine's search for its most "
        "likely tokens."
    ),
    remove_when="vLLM returns sampling masks on every device, with top_p or min_p alone, and TRL hands them on.",
)


@cache
def top_logprobs() -> tuple[Patch, ...]:
    """Return the patch; the tuple is empty if vLLM's function is not as it was when the patch was written.

    Masks are then made from vLLM's objects, which costs time and memory but changes no mask.
    """
    try:
        PatchSet(TOP_LOGPROBS).check()
    except (PatchDriftError, PatchVersionError):
        return ()
    return (TOP_LOGPROBS,)
