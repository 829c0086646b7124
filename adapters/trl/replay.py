"""Records or replays routing around TRL's scoring passes, over padded batches cut into chunks as TRL cuts them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing
from torch import Tensor, nn

from mismatch_ext.checkpoint import load_random_state, random_state
from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import Agreement, RoutingTrace, agreement, align, check_plausible, share_prompts
from mismatch_ext.routing.tokens import token_rows

Scores = tuple[Tensor, Tensor | None, Tensor | None]
Score = Callable[..., Scores]


class RoutingReplay:
    """Records or replays routing around TRL's scoring passes, and counts how far it differs from the model's own.

    Args:
        config: The `routing` section.
        model: The trainer's model.
        seed: Seed of the choice of passes that are measured; the same on every rank.

    Attributes:
        in_batch: Whether a batch is being sampled and scored.
        traces: Routes of its completions, a row of the batch each; None until they are known.
        recorded: With R2, the same of each scoring pass of the batch that was recorded, whatever tokens it was over.
        forwards: Forward passes that were replayed.
        others: Forward passes over other tokens than were recorded, which the model routed itself, by split.

    Raises:
        ReplayError: The model's routing cannot be replayed.
    """

    def __init__(self, config: RoutingConfig, model: nn.Module, seed: int) -> None:
        self.config = config
        self.layout = moe_layout(model)
        self.in_batch = False
        self.traces: list[RoutingTrace] | None = None
        self.recorded: list[list[RoutingTrace]] = []
        self.forwards = 0
        self.others: Counter[str] = Counter()
        self._seed, self._random = seed, random.Random(seed)
        self._agreement: dict[str, Agreement] = {}
        self._checked = config.mode == "R2"  # the model's own routes need no such check

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Hold the routes of one batch while it is sampled and scored."""
        self.in_batch, self.traces, self.recorded = True, None, []
        try:
            yield
        finally:
            self.in_batch, self.traces, self.recorded = False, None, []

    def begin_anew(self) -> None:
        """Measure the passes of a training as if it were the first of this trainer."""
        self._random = random.Random(self._seed)

    def state_dict(self) -> dict[str, Any]:
        """Return what chooses the passes that are measured, as JSON-able data: a resumed run measures the same ones."""
        return {"random": random_state(self._random)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            RecordError: It is damaged.
        """
        load_random_state(self._random, state.get("random"))

    def compares_gap(self) -> bool:
        """Draw whether a rollout batch is scored without replay as well."""
        return self._random.random() < self.config.native_gap_rate

    def compares(self) -> bool:
        """Draw whether the routes of a batch that is not replayed are compared with the model's own; the first always are."""
        return not self._checked or self._random.random() < self.config.agreement_rate

    def agreements(self, split: str) -> Agreement | None:
        """Return what was measured in a split since the last call, and forget it."""
        return self._agreement.pop(split, None)

    @contextmanager
    def replaying(
        self, model: nn.Module, attention_mask: Tensor, length: int, traces: Sequence[RoutingTrace], split: str | None
    ) -> Iterator[None]:
        """Run the forward pass of a padded micro-batch under the routes of its rows.

        Args:
            model: The model, possibly wrapped.
            attention_mask: 1 for tokens that are not padding `[B, S]`.
            length: Completion positions per row, padding included.
            traces: Routes of each row.
            split: "train" or "eval/<name>", which the agreement is counted for; None counts none.

        Raises:
            RoutingError: Routes do not fit their tokens.
            ReplayError: A forward pass did not obey them.
        """
        trace, recorded = _aligned(traces, attention_mask, length)
        measured = split is not None and self._random.random() < self.config.agreement_rate
        # Whoever is asked for a score may run the model on other tokens too.
        with replay_routing(model, trace, recorded, native=measured, others="native") as replay:
            yield
        self.forwards += replay.forwards
        self.others[split or "reference"] += replay.others
        if split is not None and measured:
            new = agreement(trace, replay.native, recorded, real=attention_mask.bool().flatten())
            self._agreement[split] = self._agreement[split].merge(new) if split in self._agreement else new

    def replay(
        self,
        score: Score,
        model: nn.Module,
        tokens: Tensor,
        attention_mask: Tensor,
        length: int,
        batch_size: int | None,
        *,
        traces: Sequence[RoutingTrace],
        split: str | None,
        **options: Any,
    ) -> Scores:
        """Run TRL's scoring pass, a chunk of rows at a time, each under the routes of its rows.

        Args:
            score: TRL's own `_get_per_token_logps_and_entropies`.
            model: The model, possibly wrapped.
            tokens: Prompt and completion `[B, S]`.
            attention_mask: 1 for tokens that are not padding `[B, S]`.
            length: Completion positions per row, padding included.
            batch_size: Rows per forward pass; None for all at once.
            traces: Routes of each row.
            split: "train" or "eval/<name>", which the agreement is counted for; None counts none.
            options: What else TRL passes.

        Returns:
            Log-probabilities `[B, T]`, entropies or None, auxiliary loss or None, as TRL returns them.

        Raises:
            RoutingError: Routes do not fit their tokens.
            ReplayError: A forward pass did not obey them.
        """
        _refuse_multimodal(options)
        if len(traces) != len(tokens):
            raise RoutingError(f"{len(traces)} routing traces for {len(tokens)} completions; one of each is needed.")
        parts = []
        for rows in _chunks(len(tokens), batch_size):
            if not self._checked and split is not None:
                # Once: another layer's routes are valid ids too, and only the policy can tell them apart.
                self._check(score, model, tokens[rows], attention_mask[rows], length, traces[rows])
                self._checked = True
            with self.replaying(model, attention_mask[rows], length, traces[rows], split):
                parts.append(score(model, tokens[rows], attention_mask[rows], length, batch_size, **options))
        return _joined(parts)

    def compare(
        self,
        score: Score,
        model: nn.Module,
        tokens: Tensor,
        attention_mask: Tensor,
        length: int,
        batch_size: int | None,
        *,
        traces: Sequence[RoutingTrace],
        split: str,
    ) -> None:
        """Compare recorded routes with those that the model chooses by itself, and replay nothing.

        Args:
            score, model, tokens, attention_mask, length, batch_size, traces: As for `replay`.
            split: "train" or "eval/<name>", which the agreement is counted for.

        Raises:
            RoutingError: Routes do not fit their tokens, or cannot be this model's.
        """
        for rows in _chunks(len(tokens), batch_size):
            ids, mask = tokens[rows], attention_mask[rows]
            trace, recorded = _aligned(traces[rows], mask, length)
            native = self._native(score, model, ids, mask, length)
            if not self._checked:
                self._checked = True
                check_plausible(trace, native, recorded)
            new = agreement(trace, native, recorded, real=mask.bool().flatten())
            self._agreement[split] = self._agreement[split].merge(new) if split in self._agreement else new

    def _native(
        self, score: Score, model: nn.Module, tokens: Tensor, attention_mask: Tensor, length: int
    ) -> RoutingTrace:
        """Return the routes that the model chooses by itself for a padded batch, by a pass that leaves no trace."""
        with torch.no_grad(), torch.random.fork_rng(), record_routing(model) as recording:
            score(model, tokens, attention_mask, length, len(tokens))
        return _of_pass(recording.passes, tokens, attention_mask)

    def _check(
        self,
        score: Score,
        model: nn.Module,
        tokens: Tensor,
        attention_mask: Tensor,
        length: int,
        traces: Sequence[RoutingTrace],
    ) -> None:
        native = self._native(score, model, tokens, attention_mask, length)
        trace, recorded = _aligned(traces, attention_mask, length)
        check_plausible(trace, native, recorded)

    def record(
        self,
        score: Score,
        model: nn.Module,
        tokens: Tensor,
        attention_mask: Tensor,
        length: int,
        batch_size: int | None,
        *,
        version: int,
        **options: Any,
    ) -> Scores:
        """Run TRL's scoring pass as `replay` does, and keep the model's own routes among those of the present batch.

        Args:
            score, model, tokens, attention_mask, length, batch_size, options: As for `replay`.
            version: Finished optimizer steps.
        """
        _refuse_multimodal(options)
        parts: list[Scores] = []
        traces: list[RoutingTrace] = []
        for rows in _chunks(len(tokens), batch_size):
            with record_routing(model, version=version) as recording:
                parts.append(score(model, tokens[rows], attention_mask[rows], length, batch_size, **options))
            traces += rows_of(_of_pass(recording.passes, tokens[rows], attention_mask[rows]), attention_mask[rows])
        self.recorded.append(share(traces, prompts_of(tokens, attention_mask, length)))
        return _joined(parts)


def matching(
    traces: Sequence[RoutingTrace], tokens: Tensor, attention_mask: Tensor, length: int
) -> list[RoutingTrace] | None:
    """Return the routes of each row of a scoring pass, or None where it is over other tokens than they were recorded of.

    A row in its own place has its own routes, and one in another place those of the same tokens, unless several traces are of
    the same tokens and differ.

    Args:
        traces: Routes of a batch.
        tokens: Prompt and completion of the pass `[B, S]`.
        attention_mask: 1 for tokens that are not padding `[B, S]`.
        length: Completion positions per row, padding included.
    """
    ids, real = tokens.cpu().to(torch.int32), attention_mask.bool().cpu()
    rows = [row[mask] for row, mask in zip(ids, real, strict=True)]
    if any(
        int(mask.nonzero()[-1] - mask.nonzero()[0]) + 1 != len(row)
        for row, mask in zip(rows, real, strict=True)
        if len(row)
    ):
        return None
    truncated = [not bool(mask[-length:].any()) for mask in real]
    pairs = list(zip(rows, truncated, strict=True))
    if len(rows) == len(traces) and all(_is_of(trace, *pair) for trace, pair in zip(traces, pairs, strict=True)):
        return list(traces)
    found = []
    for (row, cut), mask in zip(pairs, real, strict=True):
        fitting = [trace for trace in traces if _is_of(trace, row, cut)]
        alike = [fitted(trace, mask, length) for trace in fitting]
        if not fitting or not all(trace.same_as(alike[0]) for trace in alike):
            return None
        found.append(fitting[0])
    return found


def _is_of(trace: RoutingTrace, row: Tensor, truncated: bool) -> bool:
    """Tell whether a trace is of the tokens of a row, whose completion may have been made padding."""
    known = trace.tokens
    if known is None or trace.start:
        return False
    if truncated:
        return len(row) <= len(known) and torch.equal(known[: len(row)], row)
    return len(row) - len(known) in (0, 1) and torch.equal(known, row[: len(known)])


def _of_pass(passes: Sequence[RoutingTrace], tokens: Tensor, attention_mask: Tensor) -> RoutingTrace:
    """Return, of the forward passes that a score took, the routes of the one over its tokens."""
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
        f"a score of {tuple(tokens.shape)} tokens took {len(passes)} forward passes, none of them over those tokens: whatever "
        "overrides _get_per_token_logps_and_entropies changes them, and their routes are not known. Remove it, or "
        "mismatch.routing."
    )


def share(traces: Sequence[RoutingTrace], prompts: Sequence[Sequence[int]]) -> list[RoutingTrace]:
    """Store the routes of a prompt once for all of its completions."""
    keys = [tuple(prompt) for prompt in prompts]
    return share_prompts(traces, [len(prompt) for prompt in keys], keys).traces


def prompts_of(tokens: Tensor, attention_mask: Tensor, length: int) -> list[list[int]]:
    """Return the prompts of a padded batch as token ids."""
    prompts, real = tokens[:, :-length].cpu(), attention_mask[:, :-length].bool().cpu()
    return [row[mask].tolist() for row, mask in zip(prompts, real, strict=True)]


def on_cpu(trace: RoutingTrace) -> RoutingTrace:
    """Return a trace in the host's memory: TRL holds those of a whole generation batch, for several updates."""
    return trace.to("cpu")


def rows_of(trace: RoutingTrace, attention_mask: Tensor) -> list[RoutingTrace]:
    """Cut the routes of a padded batch into one trace per row, padding left out.

    Args:
        trace: Routes of all positions of the batch, row after row.
        attention_mask: 1 for tokens that are not padding `[B, S]`, contiguous in each row.
    """
    width, trace = attention_mask.size(1), on_cpu(trace)
    traces = []
    for row, mask in enumerate(attention_mask.bool().cpu()):
        real = mask.nonzero()[:, 0]
        first = row * width + int(real[0])
        traces.append(trace.sequence(first, first + len(real)))
    return traces


def fitted(trace: RoutingTrace, mask: Tensor, length: int) -> RoutingTrace:
    """Drop a completion's routes where `mask_truncated_completions` has made padding of it.

    Args:
        trace: Routes of one prompt and completion.
        mask: Its row of the attention mask `[S]`.
        length: Completion positions, the last of the row.
    """
    if bool(mask[-length:].any()):
        return trace
    return trace.slice(0, max(int(mask.sum()) - trace.start, 0))


def _aligned(traces: Sequence[RoutingTrace], attention_mask: Tensor, length: int) -> tuple[RoutingTrace, Tensor]:
    """Return the routes of a padded batch, a row per position, and where there are any."""
    fitting = [fitted(trace, row, length) for trace, row in zip(traces, attention_mask.cpu(), strict=True)]
    return align(fitting, attention_mask)


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
            f"mismatch.routing with multimodal inputs ({', '.join(given)}): their tokens cannot be matched to recorded "
            "routes; remove mismatch.routing for this model."
        )
