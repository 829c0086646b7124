"""Completions that TRL joins from several calls of its engine: the calls' records are joined to one for each completion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.passes import RolloutPass
from torch import nn

from mismatch_ext.errors import RecordError
from mismatch_ext.names import PREFIX
from mismatch_ext.ranks import Ranks, together
from mismatch_ext.turns import Joined, Trained, any_asked, join_turns
from mismatch_ext.verdicts import Verdicts

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.generation import CheckedGeneration
    from trl import GRPOTrainer as _Host
else:
    _Host = object


class TurnsMixin(_Host):
    """Joins the engine's records of each completion into one; `MismatchTrainerMixin` keeps the engine's records."""

    _rollout_pass: RolloutPass | None
    _ranks: Ranks
    _verdicts: Verdicts
    _metrics: dict[str, defaultdict[str, list[float]]]
    model: nn.Module
    vllm_generation: CheckedGeneration  # type: ignore[assignment]  # around TRL's own
    if TYPE_CHECKING:

        @property
        def _verified(self) -> bool: ...

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does, also with tools or a `rollout_func`, and check what is trained on against each turn's records.

        Raises:
            RecordError: What is trained on is not what the turns were given and sampled, or nothing that was recorded; or a
                completion's turns are of different weights.
        """
        batch, own = self._rollout_pass, getattr(self, "rollout_func", None) is not None
        if batch is None or not batch.fresh:
            return super()._generate(*args, **kwargs)
        joins = self._verified and (own or getattr(self, "tools", None))
        with overridden(batch, joining=bool(joins)):
            output = super()._generate(*args, **kwargs)
        if self._verified:
            self.vllm_generation.agree()
        batch.generated += zip(*output[:2], strict=False)
        if not joins:
            return output
        with self._verdicts.checking("records"), together(self._ranks):
            trained = _trained(output)
            if own and not any_asked(batch.records, trained):
                raise RecordError(
                    "a rollout_func returned completions that trainer.vllm_generation.generate has not sampled, so that neither "
                    "their weights and settings nor their log-probabilities are known; generate with it, in the place of "
                    "trainer.vllm_generation.llm or an engine of your own."
                )
            limit = None if own else self.max_completion_length
            joined = join_turns(batch.records, trained, limit=limit, every_turn=not own)
            batch.records[:] = joined.records
            self._count(joined)
        return output

    def _count(self, joined: Joined) -> None:
        """Log how many turns the completions of a batch have, and where their routes are from."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics[PREFIX + "turns"].append(joined.turns / len(joined.records))
        if joined.records[0].routing is not None:
            for name in ("sampled_rows", "prefilled_rows", "rerouted_rows"):
                metrics[f"{PREFIX}routing/{name}"].append(float(getattr(joined, name)))


def _trained(output: Sequence[Any]) -> list[Trained]:
    """Return the completions of what `_generate` returns: prompts, completions, masks, messages, log-probabilities."""
    prompts, completions, masks, _, logprobs = output[:5]
    rows = zip(
        prompts,
        completions,
        [[1] * len(ids) for ids in completions] if masks is None else masks,
        [None] * len(completions) if logprobs is None else logprobs,
        strict=True,
    )
    return [
        Trained(
            prompt_ids=tuple(map(int, prompt)),
            response_ids=tuple(map(int, completion)),
            response_mask=tuple(map(bool, mask)),
            rollout_logprobs=None if values is None else tuple(values),
        )
        for prompt, completion, mask, values in rows
    ]
