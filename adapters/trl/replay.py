"""Replay over TRL's scoring passes: padded batches, cut into chunks as TRL cuts them, each under the routes of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers import routing as backend
from mismatch_ext.adapters.trl.rows import Rows, prompts_of
from numpy.typing import NDArray
from torch import Tensor, nn

from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import RoutingTrace, align, share_prompts
from mismatch_ext.routing.replay import RouteReplay
from mismatch_ext.routing.tokens import token_rows

Scores = tuple[Tensor, Tensor | None, Tensor | None]
Score = Callable[..., Scores]


class ScoreReplay(RouteReplay):
    """Records or replays routing around TRL's scoring passes."""

    # A rank that refuses routes raises by itself, because only one rank may have a pass over other tokens; the launcher then ends
    # the other ranks.

    def __init__(self, config: RoutingConfig, model: nn.Module, seed: int) -> None:
        super().__init__(config, backend, model, seed=seed)

    def begin_anew(self) -> None:
        """Draw as from the beginning, because a training begins."""
        self.draws.begin_anew()

    @contextmanager
    def over_rows(
        self, model: nn.Module, attention_mask: Tensor, length: int, traces: Sequence[RoutingTrace], split: str
    ) -> Iterator[None]:
        """Run the forward pass of a padded micro-batch under the routes of its rows."""
        rows = zip(traces, attention_mask.cpu(), strict=True)
        trace, recorded = align([fitted(trace, row, length) for trace, row in rows], attention_mask)
        with self.replaying(model, trace, recorded, real=attention_mask.bool().flatten(), split=split):
            yield

    def replay(
        self, score: Score, model: nn.Module, rows: Rows, traces: Sequence[RoutingTrace], split: str,
        batch_size: int | None = None, **options: Any,
    ) -> Scores:  # fmt: skip
        """Run TRL's scoring pass, a chunk of rows at a time, each under the routes of its rows."""
        _refuse_multimodal(options)
        tokens, attention_mask, length = rows
        parts = []
        for part in _chunks(len(tokens), batch_size):
            with self.over_rows(model, attention_mask[part], length, traces[part], split):
                # TRL 1.14 takes the size only by keyword.
                parts.append(score(model, tokens[part], attention_mask[part], length, batch_size=batch_size, **options))
        return _joined(parts)

    def record(
        self, score: Score, model: nn.Module, rows: Rows, version: int, batch_size: int | None = None, **options: Any
    ) -> tuple[Scores, list[RoutingTrace]]:
        """Run TRL's scoring pass as `replay` does, and return its scores and the model's own routes of each row."""
        _refuse_multimodal(options)
        tokens, attention_mask, length = rows
        parts: list[Scores] = []
        traces: list[RoutingTrace] = []
        for part in _chunks(len(tokens), batch_size):
            ids, mask = tokens[part], attention_mask[part]
            with backend.record_routing(model, version=version) as recording:
                parts.append(score(model, ids, mask, length, batch_size=batch_size, **options))
            traces += rows_of(_of_pass(recording.passes, ids, mask), mask)
        return _joined(parts), share(traces, prompts_of(*rows))


def is_of(trace: RoutingTrace, tokens: NDArray[np.int64]) -> bool:
    """Tell whether a trace is of the tokens of a row, the last of which has no routes in an engine's."""
    known = trace.tokens
    lacks_first_rows = trace.rows > 0 and trace.start > 0
    if known is None or lacks_first_rows:
        return False
    return len(tokens) - len(known) in (0, 1) and np.array_equal(known.cpu().numpy(), tokens[: len(known)])


def _of_pass(passes: Sequence[RoutingTrace], tokens: Tensor, attention_mask: Tensor) -> RoutingTrace:
    """Return the routes of the forward pass that was over these tokens, among those that a score took."""
    wanted = token_rows(tokens, attention_mask)
    for trace in passes:
        known = trace.token_rows()
        if (
            known is not None
            and trace.rows == len(wanted.ids)
            and not bool(known.differ(wanted.to(known.ids.device)).any())
        ):
            return trace
    raise RoutingError(
        f"a score of {tuple(tokens.shape)} tokens took {len(passes)} forward passes, none of them over those tokens: remove what "
        "overrides _get_per_token_logps_and_entropies, or mismatch.routing."
    )


def share(traces: Sequence[RoutingTrace], prompts: Sequence[Sequence[int]]) -> list[RoutingTrace]:
    """Store the routes of a prompt once for all of its completions."""
    keys = [tuple(prompt) for prompt in prompts]
    return share_prompts(traces, [len(prompt) for prompt in keys], keys)


def rows_of(trace: RoutingTrace, attention_mask: Tensor) -> list[RoutingTrace]:
    """Cut the routes of a padded batch into one trace per row, padding left out."""
    # In the host's memory, because TRL keeps the traces of a whole generation batch for several updates.
    width, trace = attention_mask.size(1), trace.to("cpu")
    traces = []
    for row, mask in enumerate(attention_mask.bool().cpu()):
        real = mask.nonzero()[:, 0]
        first = row * width + int(real[0])
        traces.append(trace.sequence(first, first + len(real)))
    return traces


def fitted(trace: RoutingTrace, mask: Tensor, length: int) -> RoutingTrace:
    """Drop a completion's routes where `mask_truncated_completions` has turned the completion into padding."""
    if bool(mask[-length:].any()):
        return trace
    tokens = int(mask.sum())
    if not trace.rows and trace.tokens is not None:
        start = min(trace.start, tokens)
        return replace(trace, start=start, tokens=trace.tokens[:start])
    return trace.slice(0, max(tokens - trace.start, 0))


def _chunks(rows: int, batch_size: int | None) -> Iterator[slice]:
    size = batch_size or rows
    return (slice(first, first + size) for first in range(0, rows, size))


def _joined(parts: Sequence[Scores]) -> Scores:
    """Join the results of chunks as TRL joins its own."""
    logps, entropies, auxiliary = zip(*parts, strict=True)
    return (
        torch.cat(logps),
        None if entropies[0] is None else torch.cat(entropies),
        None if auxiliary[0] is None else torch.stack(auxiliary).mean(),
    )


def _refuse_multimodal(options: Mapping[str, Any]) -> None:
    given = [name for name, value in options.items() if value is not None and not isinstance(value, bool)]
    if given:
        raise RoutingError(
            f"mismatch.routing with multimodal inputs ({', '.join(given)}): no token id tells what an image shows, so that this "
            "pass cannot be shown to be the one that its routes are of; remove mismatch.routing for this data."
        )
