"""What the doctor asks of an engine, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mismatch_ext.doctor.sample import Sample
from mismatch_ext.records import RolloutRecord, SamplingSettings
from mismatch_ext.routing import RoutingShape


@dataclass(frozen=True, kw_only=True)
class ToSample:
    """Responses that an engine is to sample as the run does.

    Args:
        prompts: Token ids of each prompt, as the trainer has them.
        responses: How many at least; each prompt gets as many as the others.
        max_tokens: Most tokens of a response.
        sampling: What the run's requests say of sampling, by the engine's names.
        seen: Token ids of each prompt as the engine gets them; None for those of the trainer.
    """

    prompts: Sequence[Sequence[int]]
    responses: int
    max_tokens: int
    sampling: Mapping[str, Any]
    seen: Sequence[Sequence[int]] | None = None

    @property
    def of_each(self) -> int:
        """Responses of each prompt."""
        return -(-self.responses // len(self.prompts))

    @property
    def given(self) -> list[list[int]]:
        """Token ids of each prompt as the engine gets them."""
        return [list(prompt) for prompt in (self.prompts if self.seen is None else self.seen)]

    @property
    def settings(self) -> SamplingSettings:
        """What records of it say of their sampling."""
        return SamplingSettings(temperature=float(self.sampling.get("temperature", 1.0)))

    def routed(self, shape: RoutingShape | None) -> RoutingShape | None:
        """Return the shape of the routes that can be read, if the engine records any.

        Where the engine sees other prompts, its routes are of other rows than the trainer's.
        """
        return shape if self.seen is None else None

    def sampled(self, records: Sequence[RolloutRecord]) -> Sample:
        """Return what an engine sampled, after the trainer's prompts.

        Args:
            records: Of all responses, those of a prompt beside each other; empty responses are left out.

        Raises:
            RecordError: As in `Sample`.
        """
        if self.seen is not None:
            owners = [tuple(prompt) for prompt in self.prompts for _ in range(self.of_each)]
            records = [replace(record, prompt_ids=owner) for record, owner in zip(records, owners, strict=True)]
        return Sample.of([record for record in records if record.response_ids])


def sequences(sample: Sample) -> list[list[int]]:
    """Return the token ids of each prompt with its response."""
    return [[*prompt, *response] for prompt, response in zip(sample.prompts, sample.responses, strict=True)]
