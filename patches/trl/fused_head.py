"""Let a function compute log-probabilities instead of TRL's fused output projection, from the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.patching import Patch, applied

Score = Callable[..., Tensor | None]
"""Takes hidden states `[N, H]`, weight `[V, H]`, bias or None, labels `[N]`, and by keyword temperature, scale and softcap;
returns log-probabilities `[N]`, or None to keep TRL's."""

_scores: list[tuple[Score, bool]] = []  # of the blocks that are open, the last one counts; True asks for entropies too
_TAKEN = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale", "outputs",
)  # fmt: skip


def _make(original: Any) -> Any:
    class ChunkedLogProbFunction(original):  # type: ignore[misc]
        @classmethod
        def apply(cls, *args: Any) -> Any:
            if not _scores:
                return original.apply(*args)
            (score, entropies), values = _scores[-1], dict(zip(_TAKEN, args, strict=True))
            logprobs = score(
                *(values[name] for name in ("hidden", "weight", "bias", "targets")),
                temperature=values["temperature"],
                scale=values["logit_scale"],
                softcap=values["final_logit_softcapping"],
            )
            if logprobs is not None and not entropies:
                return logprobs, None, None, None, None  # without TRL's logits of the whole vocabulary
            outputs = original.apply(*args)
            return outputs if logprobs is None else (logprobs, *outputs[1:])

    return ChunkedLogProbFunction


def _probe(original: Any) -> str | None:
    """Say what it returns instead of the log-probabilities of a small head with bias, softcap, scale and temperature."""
    hidden, weight = torch.eye(2), torch.tensor([[0.3, -1.0], [2.0, 0.5], [-0.7, 0.1]])
    bias, targets = torch.tensor([0.2, 0.0, -0.4]), torch.tensor([1, 2])
    logits = torch.tanh((hidden @ weight.T + bias) * 1.5 / 2.0) * 2.0 / 0.8
    expected = logits.log_softmax(-1)[torch.arange(2), targets]
    with torch.no_grad():
        outputs = original.apply(hidden, weight, bias, targets, 0.8, 2, 2.0, 1.5, ())
    if len(outputs) != 5:
        return f"it returned {len(outputs)} outputs, not log-probabilities and four more."
    return None if torch.allclose(outputs[0], expected, atol=1e-5) else f"it returned {outputs[0]}, not {expected}."


FUSED_HEAD = Patch(
    name="trl/fused_head",
    peer="trl",
    supports=">=1.16.0,<=1.16.0",
    target="trl.trainer.utils:_ChunkedLogProbFunction",
    make=_make,
    probe=_probe,
    observed="a scored batch of which no token came to it is refused",
    upstream="https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/utils.py",
    reason=(
        "GRPOTrainer never holds the logits: what log-probabilities over the tokens that truncation left are made of is known "
        "inside its fused output projection alone."
    ),
    not_covered="Losses that do not go through add_fused_lm_head; an update without such a pass is refused.",
    remove_when="TRL's fused head takes a mask of the vocabulary.",
)


@contextmanager
def scoring_with(score: Score, *, entropies: bool) -> Iterator[None]:
    """Take the log-probabilities of TRL's fused head from a function while a context is open.

    Args:
        score: Computes the log-probabilities; see `Score`.
        entropies: Whether TRL's own head runs too, for its entropies; otherwise it returns none.

    Raises:
        PatchError: TRL's fused head is not what it was.
    """
    entry = (score, entropies)
    _scores.append(entry)
    try:
        with applied(FUSED_HEAD):
            yield
    finally:
        _scores.remove(entry)
