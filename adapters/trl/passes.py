"""One batch from generation to its loss, and its scoring passes, which are found by their tokens and never as "the last one"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from mismatch_ext.adapters.trl.overridden import shadowed
from mismatch_ext.adapters.trl.replay import Scores, matching, prompts_of
from torch import Tensor

from mismatch_ext.errors import ConfigError
from mismatch_ext.rollout import RolloutRecord
from mismatch_ext.routing import RoutingTrace

LEADING = ("model", "input_ids", "attention_mask", "logits_to_keep")
"""What `_get_per_token_logps_and_entropies` takes first, in TRL's order."""


@dataclass(frozen=True)
class Scored:
    """A scoring pass.

    Attributes:
        model: The model that was run.
        tokens: Prompt and completion `[B, S]`.
        attention_mask: 1 for tokens that are not padding `[B, S]`.
        length: Completion positions per row, padding included.
        options: What else was given, by name.
        reference: Whether the reference policy was scored.
        scores: What came out.
    """

    model: Any
    tokens: Tensor
    attention_mask: Tensor
    length: int
    options: dict[str, Any]
    reference: bool
    scores: Scores

    def is_of(self, tokens: Tensor, attention_mask: Tensor, length: int) -> bool:
        """Tell whether these are the tokens that were scored, in the same places."""
        return (
            self.length == length
            and torch.equal(self.tokens, tokens)
            and torch.equal(self.attention_mask, attention_mask)
        )

    def is_of_rows(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> bool:
        """Tell whether these are the tokens that were scored, whatever the padding."""
        if len(self.tokens) != len(completions) or any(len(ids) > self.length for ids in completions):
            return False
        ends = self.tokens[:, self.tokens.size(1) - self.length :].tolist()
        same = all(end[: len(ids)] == list(ids) for end, ids in zip(ends, completions, strict=True))
        return same and prompts_of(self.tokens, self.attention_mask, self.length) == [list(ids) for ids in prompts]


def _scored(arguments: tuple[Any, ...], named: dict[str, Any], reference: bool, scores: Scores) -> Scored:
    given = dict(zip(LEADING, arguments, strict=False)) | named
    model, tokens, attention_mask, length = (given.pop(name) for name in LEADING)
    if len(arguments) > len(LEADING):
        given["batch_size"] = arguments[len(LEADING)]
    return Scored(model, tokens, attention_mask, length, given, reference, scores)


@dataclass
class RolloutPass:
    """What is known of a batch of rollouts while it is generated and scored, or of a micro-batch while its loss is computed.

    It does not live longer: what the loss needs of a batch travels with TRL's inputs, row by row.

    Attributes:
        fresh: Whether the batch is being generated and scored.
        prompts: Token ids of the prompts of the latest generation.
        generated: Token ids of prompt and completion of each sample.
        records: What the engine returned, in its order.
        routes: Routes of the rows: with R3 the sampler's; with R2 those of each scoring pass that was recorded, over any tokens;
            in a loss those that travelled with the micro-batch.
        scored: The host's scoring passes, where they are kept.
        policy: The policy's log-probabilities `[B, T]` by a pass of our own, where the host takes none.
        joining: Whether turns are still being generated, so that records are of calls and not yet of completions.
        masked_before: Number of passes over masks before the batch.
    """

    fresh: bool = True
    prompts: list[list[int]] = field(default_factory=list)
    generated: list[tuple[list[int], list[int]]] = field(default_factory=list)
    records: list[RolloutRecord] = field(default_factory=list)
    routes: list[list[RoutingTrace]] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    policy: Tensor | None = None
    joining: bool = False
    masked_before: int = 0

    def routes_of(self, tokens: Tensor, attention_mask: Tensor, length: int) -> list[RoutingTrace] | None:
        """Return the routes of each row of a scoring pass; None where they are of other tokens."""
        found = (matching(routes, tokens, attention_mask, length) for routes in self.routes)
        return next((routes for routes in found if routes is not None), None)

    def of_policy(self, model: Any, is_of: Callable[[Scored], bool]) -> Scored | None:
        """Return the first pass of the policy over some tokens, or None."""
        found = (scored for scored in self.scored if scored.model is model and not scored.reference and is_of(scored))
        return next(found, None)

    def of_reference(self, is_of: Callable[[Scored], bool]) -> Scored | None:
        """Return the first pass of the reference over some tokens, or None."""
        return next((scored for scored in self.scored if scored.reference and is_of(scored)), None)


@contextmanager
def watched_batch(trainer: Any, batch: RolloutPass) -> Iterator[None]:
    """Keep the host's scoring passes, and the prompts of its latest generation, as the host sees both.

    Args:
        trainer: The trainer, while it generates and scores the batch.
        batch: Takes both.
    """
    score, generate = trainer._get_per_token_logps_and_entropies, trainer._generate

    def watched_score(*arguments: Any, **named: Any) -> Scores:
        scores: Scores = score(*arguments, **named)
        model = arguments[0] if arguments else named["model"]
        batch.scored.append(_scored(arguments, named, trainer.mm.scoring.is_reference(model), scores))
        return scores

    def watched_generate(*arguments: Any, **named: Any) -> Any:
        output = generate(*arguments, **named)
        batch.prompts = [list(ids) for ids in output[0]]
        return output

    with shadowed(trainer, _get_per_token_logps_and_entropies=watched_score, _generate=watched_generate):
        yield


@contextmanager
def watched_loss(trainer: Any, model: Any, inputs: Any) -> Iterator[list[Scored]]:
    """Keep the passes that TRL's own loss takes over the tokens of its micro-batch; in their order.

    Args:
        trainer: The trainer, while TRL's own `_compute_loss` runs.
        model: The model that is trained.
        inputs: The micro-batch.

    Raises:
        ConfigError: TRL's loss scored no such tokens, or not each of them.
    """
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length, found, score = inputs["completion_ids"].size(1), [], trainer._get_per_token_logps_and_entropies

    def watched(*arguments: Any, **named: Any) -> Scores:
        scores: Scores = score(*arguments, **named)
        scored = _scored(arguments, named, False, scores)
        if scored.model is model and scored.is_of(tokens, attention_mask, length):
            found.append(scored)
        return scores

    with shadowed(trainer, _get_per_token_logps_and_entropies=watched):
        yield found
    if not found or found[0].scores[0].shape != inputs["completion_ids"].shape:
        shape = list(found[0].scores[0].shape) if found else None
        raise ConfigError(
            f"mismatch.kl and mismatch.correction with {type(trainer).__name__}: TRL's loss got log-probabilities {shape} for "
            f"completions {list(inputs['completion_ids'].shape)} of its micro-batch; one of each token is needed, from "
            "_get_per_token_logps_and_entropies. Remove what overrides it; if your _compute_loss gives TRL's other rows, put its "
            "class first: class T(Yours, MismatchGRPOTrainer)."
        )
