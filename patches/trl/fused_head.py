"""Let a function compute log-probabilities instead of TRL's fused output projection, from the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd import Function

from mismatch_ext.patching import Given, Patch

Score = Callable[..., Tensor | None]
"""Takes hidden states `[N, H]`, weight `[V, H]`, bias or None, labels `[N]`, and by keyword temperature, scale and softcap;
returns log-probabilities `[N]`, or None to keep TRL's."""

_SCORES: Given[Score] = Given()
_TAKEN = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip


def _make(original: Any) -> Any:
    class ChunkedLogProbFunction(original):  # type: ignore[misc]
        @classmethod
        def apply(cls, *args: Any) -> Any:
            found = original.apply(*args)
            if (score := _SCORES.last) is None:
                return found
            given = dict(zip(_TAKEN[1:], args, strict=True))
            logprobs = score(
                *(given[name] for name in ("hidden", "weight", "bias", "targets")),
                temperature=given["temperature"],
                scale=given["logit_scale"],
                softcap=given["final_logit_softcapping"],
            )
            return found if logprobs is None else (logprobs, *found[1:])

    return ChunkedLogProbFunction


def _probe(original: Any) -> str | None:
    """Say why this is not the function that TRL's fused head calls with the arguments read here, or return None."""
    import trl.trainer.utils as module

    if not (isinstance(original, type) and issubclass(original, Function)):
        return "it is no autograd Function."
    found = tuple(inspect.signature(original.forward).parameters)
    if found != _TAKEN:
        return f"its parameters are {found}, not {_TAKEN}."
    called = "_ChunkedLogProbFunction.apply(" in inspect.getsource(module.add_fused_lm_head)
    return None if called else "add_fused_lm_head no longer calls it."


FUSED_HEAD = Patch(
    name="trl/fused_head",
    peer="trl",
    supports=">=1.16.0,<=1.16.0",
    target="trl.trainer.utils:_ChunkedLogProbFunction",
    binding_only=True,
    make=_make,
    probe=_probe,
    upstream="https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/utils.py",
    reason=(
        "GRPOTrainer never holds the logits: what log-probabilities over the tokens that truncation left are made of is known "
        "inside its fused output projection alone."
    ),
    not_covered="Losses that do not go through add_fused_lm_head; an update without such a pass is refused.",
    remove_when="TRL's fused head takes a mask of the vocabulary.",
)


def scoring_with(score: Score) -> AbstractContextManager[None]:
    """Take the log-probabilities of TRL's fused head from a function while a context is open.

    Args:
        score: Computes the log-probabilities; see `Score`.

    Raises:
        PatchError: TRL's fused head is not what it was.
    """
    return _SCORES.during(score, FUSED_HEAD)
