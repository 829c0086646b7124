"""Batches of verl's as evidence: their fields stay in its TransferQueue until the step is over, and are fetched when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from mismatch_ext.adapters.verl.measure import BEFORE, CHUNK, MASK, OLD, ROLLOUT, sampled_rows
from mismatch_ext.adapters.verl.replay import FIELD
from mismatch_ext.adapters.verl.rollout.digests import proven, without_digests
from torch import Tensor

from mismatch_ext.evidence import EvidenceRow, gap_of
from mismatch_ext.rollout import Provenance
from mismatch_ext.routing import RoutingTrace

PROMPTS, RESPONSES = "prompts", "responses"
SCORES = (ROLLOUT, OLD, MASK, BEFORE)


class StoredBatch:
    """A batch of verl's keys, without the rows that verl added to fill it up.

    Args:
        batch: The keys.
        step: Finished optimizer steps of the weights that score it.
        provenance: Where its rollouts come from, but for their version; None if that is not known.
        experts: `layers`, `num_experts` and `top_k` of a model whose rollouts come with routes; None without routes.
        settings: Returns how the trainer computes.
    """

    def __init__(
        self,
        batch: Any,
        step: int,
        *,
        provenance: Provenance | None,
        experts: Mapping[str, Any] | None,
        settings: Callable[[], Mapping[str, Any]],
    ) -> None:
        rows = sampled_rows(batch)
        self.step, self.settings = step, settings
        self._keys: list[str] = [batch.keys[row] for row in rows]
        self._versions = [batch.tags[row].get("min_global_steps") for row in rows]
        self._partition, self._provenance, self._experts = batch.partition_id, provenance, experts

    def names(self) -> Sequence[Sequence[str]]:
        """Return the keys, which verl's and our messages name rollouts by."""
        return [[key] for key in self._keys]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return each row's mean gap and its number of sampled tokens, both `[B]`, of `CHUNK` rows at a time."""
        gaps, tokens = [], []
        for first in range(0, len(self._keys), CHUNK):
            keys = self._keys[first : first + CHUNK]
            data = self._fetched(keys, SCORES)
            for values in _values(data, len(keys)):
                gaps.append(gap_of(EvidenceRow(prompt_ids=(), response_ids=(), **values)))
                tokens.append(int(values["mask"].sum()))
        return torch.tensor(gaps), torch.tensor(tokens)

    def row(self, number: int) -> EvidenceRow:
        """Return a row."""
        key, version = self._keys[number], self._versions[number]
        routed = [] if self._experts is None else [FIELD]
        data = self._fetched([key], [PROMPTS, RESPONSES, *SCORES, *routed])
        prompt, response = (data[name].unbind()[0] for name in (PROMPTS, RESPONSES))
        provenance = self._provenance
        if provenance is not None and version is not None:
            provenance = replace(provenance, weight_version=version)
        (values,) = _values(data, 1)
        scores: dict[str, Any] = {name: None if array is None else array.tolist() for name, array in values.items()}
        return EvidenceRow(
            prompt_ids=prompt.tolist(),
            response_ids=response.tolist(),
            provenance=provenance,
            routes=self._routes(data.get(FIELD, None), torch.cat([prompt, response]), key),
            sampled_after=version,
            **scores,
        )

    def _fetched(self, keys: Sequence[str], names: Sequence[str]) -> Any:
        return tq.kv_batch_get(keys=list(keys), partition_id=self._partition, select_fields=list(names))

    def _routes(self, field: Any, tokens: Tensor, key: str) -> RoutingTrace | None:
        """Return the routes of a row as far as they are of its tokens; None without any."""
        if field is None or self._experts is None:
            return None
        recorded = field.unbind()[0]
        rows, _ = proven(recorded, tokens)
        if not rows:
            return None
        return RoutingTrace.ingest(
            without_digests(recorded)[:rows],
            num_experts=self._experts["num_experts"],
            layers=self._experts["layers"],
            top_k=self._experts["top_k"],
            tokens=tokens[:rows].tolist(),
            version=0,
            request=key,
            last_row=True,
        )


def _values(data: Any, rows: int) -> Iterator[dict[str, Any]]:
    """Yield the engine's and the trainer's log-probabilities of each row, and its mask, as arrays: lists of all would be slow."""

    def arrays(name: str, dtype: torch.dtype) -> list[Any] | None:
        field = data.get(name, None)
        return None if field is None else [row.to(dtype).numpy() for row in field.unbind()]

    # Once verl has corrected the batch, its mask lacks the tokens that were rejected, which are what an alarm is about.
    masks = arrays(BEFORE, torch.bool) or arrays(MASK, torch.bool)
    engine, trainer = arrays(ROLLOUT, torch.float64), arrays(OLD, torch.float64)
    for row in range(rows):
        mask = np.zeros(0, bool) if masks is None else masks[row]
        yield {
            "mask": mask,
            "rollout": np.full(len(mask), np.nan) if engine is None else engine[row],
            "trainer": None if trainer is None else trainer[row],
        }
