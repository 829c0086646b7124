"""Keep the most likely tokens that truncation left as numbers; vLLM makes an object and a text of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from mismatch_ext.errors import PatchDriftError
from mismatch_ext.patching import Patch, described
from mismatch_ext.sampling_mask import LeftTokens

_kinds: list[Callable[[], Any]] = []  # of the blocks that are open, the last one counts


class SampledLogprobs(list[Any]):
    """A request's log-probabilities of the sampled tokens, as vLLM lists them.

    Attributes:
        left: The most likely tokens at each sampled token: those that were left to sample from, or as `storing` says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left = _kinds[-1]() if _kinds else LeftTokens()


@contextmanager
def storing(kind: Callable[[], Any]) -> Iterator[None]:
    """Let objects of a kind take the most likely tokens of the requests that begin in a block, by their method `take`."""
    _kinds.append(kind)
    try:
        yield
    finally:
        _kinds.remove(kind)


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


def _probe(original: Callable[..., None]) -> str | None:
    """Say what it makes of one position's sampled and most likely token instead of an entry for each, or return None."""
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    processor = LogprobsProcessor(
        tokenizer=None,
        logprobs=[],
        prompt_logprobs=None,
        cumulative_logprob=0.0,
        num_logprobs=1,
        num_prompt_logprobs=None,
    )
    lists = LogprobsLists(np.array([[5, 7]]), np.array([[-0.5, -0.25]]), np.array([2]))
    original(processor, lists)
    original(processor, lists._replace(logprob_token_ids=np.array([[5]]), logprobs=np.array([[-0.5]])))
    values = [{token: entry.logprob for token, entry in position.items()} for position in processor.logprobs or []]
    return None if values == [{5: -0.5, 7: -0.25}, {5: -0.5}] else f"it made {values}."


TOP_LOGPROBS = Patch(
    name="vllm/top_logprobs",
    peer="vllm",
    supports=">=0.24.0,<=0.32.0",
    target="vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
    make=_make,
    probe=_probe,
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
    """Return the patch; the tuple is empty if vLLM's function does not do what the patch needs.

    Masks are then made from vLLM's objects, which costs time and memory but changes no mask.
    """
    try:
        described(TOP_LOGPROBS)
    except PatchDriftError:
        return ()
    return (TOP_LOGPROBS,)
