"""Causes in which an engine sees other prompts than the trainer: special tokens twice, templates, truncation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mismatch_ext.adapters.transformers.doctor import Scorer
from mismatch_ext.adapters.transformers.doctor_models import end_tokens
from torch import nn

from mismatch_ext.doctor import Cause
from mismatch_ext.doctor.sample import Floats

Ids = tuple[int, ...]

# How far from either end of a prompt a token is tried as the missing one, and about how many lengths of a cut prompt are tried.
PLACES, LENGTHS = 6, 8


def of_prompts(scorer: Scorer) -> list[Cause]:
    """Return the causes in which the engine has other prompts."""
    prompts = scorer.sample.prompts
    added = _special(scorer.model)
    # A token of a template has the same place, from the start or from the end, in every prompt.
    shortest = min(map(len, prompts))
    places = [(f"{at + 1} from the start", at) for at in range(1, min(PLACES, shortest - 1))]
    places += [(f"{-at} from the end", at) for at in range(-2, -min(PLACES, shortest - 1), -1)]
    places = [(name, at) for name, at in places if len({prompt[at] for prompt in prompts}) == 1]
    # Lengths of the prompts except the longest: such a length cuts some prompts but not others.
    lengths = sorted({len(prompt) for prompt in prompts} - {max(map(len, prompts))})
    lengths = lengths[:: -(-len(lengths) // LENGTHS)] if lengths else []
    # The last choice of an extra token is each prompt's own first token.
    common = {prompt[0] for prompt in prompts}
    names = (*map(str, added), f"{common.pop() if len(common) == 1 else 'its own first one'}, twice")

    def cause(key: str, said: str, change: Callable[[int, Ids], Ids], **given: Any) -> Cause:
        def predict(x: float, *, screen: bool = False) -> Floats:
            return scorer.logprobs(prompt=partial(change, int(x)), screen=screen)

        return Cause(
            key=key,
            family="prompt",
            remedy="prompt",
            said=said,
            predict=predict,
            screen=partial(predict, screen=True),
            **given,
        )

    found = [
        cause("missing_first", "the engine's prompt lacks its first {x} tokens",
              lambda x, ids: ids[min(x, len(ids) - 1) :], grid=(1.0, 2.0, 3.0)),
        cause("missing_last", "the engine's prompt lacks its last {x} tokens",
              lambda x, ids: ids[: max(1, len(ids) - x)], grid=(1.0, 2.0)),
        cause("missing_token", "the engine's prompt lacks token {x}",
              lambda x, ids: _without(ids, places[x][1]),
              grid=tuple(map(float, range(len(places)))), names=tuple(name for name, _ in places)),
        cause("truncated_prompt", "the engine's prompt is cut to its last {x} tokens",
              lambda x, ids: ids[-x:], grid=tuple(map(float, lengths))),
        cause("extra_token", "the engine's prompt begins with an extra token {x}",
              lambda x, ids: ((*added, ids[0])[x], *ids),
              grid=tuple(map(float, range(len(names)))), names=names),
        cause("extra_last", "the engine's prompt ends with an extra token {x}",
              lambda x, ids: (*ids, added[x]),
              grid=tuple(map(float, range(len(added)))), names=tuple(map(str, added))),
    ]  # fmt: skip
    return [listed for listed in found if listed.grid]


def _without(ids: tuple[int, ...], at: int) -> tuple[int, ...]:
    at %= len(ids)
    return ids[:at] + ids[at + 1 :]


def _special(model: nn.Module) -> tuple[int, ...]:
    """Return the special tokens that a template or tokenizer may add."""
    config: Any = getattr(model, "config", None)
    known = [getattr(config, name, None) for name in ("bos_token_id", "pad_token_id")]
    return tuple(dict.fromkeys([*(token for token in known if isinstance(token, int)), *end_tokens(model)]))
