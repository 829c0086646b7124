"""Completions that TRL joins from several calls of its engine: the calls' records are joined to one for each completion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.own_calls import own_calls
from mismatch_ext.adapters.trl.passes import RolloutPass
from torch import nn

from mismatch_ext.errors import RecordError
from mismatch_ext.recorder import PREFIX
from mismatch_ext.records import RolloutRecord
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
            RecordError: What is trained on is not what the turns were given and sampled.
            ProvenanceError: Turns of a completion are of different weights.
        """
        batch, own = self._rollout_pass, getattr(self, "rollout_func", None) is not None
        if batch is None or not batch.fresh or not self._verified or not (own or getattr(self, "tools", None)):
            return super()._generate(*args, **kwargs)
        here = own and self.vllm_generation.mode == "colocate"
        calls = own_calls(self.vllm_generation, batch.records) if here else nullcontext()
        with overridden(batch, joining=True), self._verdicts.around("records", calls):
            output = super()._generate(*args, **kwargs)
        with self._verdicts.checking("records"):
            trained = _trained(output)
            if own and not any_asked(batch.records, trained):
                batch.records.clear()
                self._expect_own_engine()
                return output
            limit = None if own else self.max_completion_length
            joined = join_turns(batch.records, trained, limit=limit, every_turn=not own)
            self._expect_masks(joined.records)
            batch.records[:] = joined.records
            self._count(joined)
        return output

    def _expect_own_engine(self) -> None:
        """Refuse completions of another engine where more is needed of them than tokens and log-probabilities."""
        replays = self.vllm_generation.layout is not None
        if replays or self.vllm_generation.masks is not None:
            what, section = ("routes", "routing.mode='R3'") if replays else ("sampling masks", "sampling_mask")
            raise RecordError(
                f"mismatch.{section} with a rollout_func whose tokens the trainer's engine has not sampled: their {what} are not "
                f"known. Generate with trainer.vllm_generation.generate, or remove mismatch.{section.partition('.')[0]}."
            )

    def _expect_masks(self, records: Sequence[RolloutRecord]) -> None:
        if self.vllm_generation.masks is not None and any(record.support is None for record in records):
            raise RecordError(
                "mismatch.sampling_mask with a rollout_func that asks trainer.vllm_generation.llm: sampling masks come with what "
                "trainer.vllm_generation.generate samples. Use it, or remove mismatch.sampling_mask."
            )

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
