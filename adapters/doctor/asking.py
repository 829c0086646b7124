"""The doctor's request to an engine for responses; it is the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatch_ext.doctor.sample import Sample
from mismatch_ext.rollout import RolloutRecord, SamplingSettings
from mismatch_ext.routing import RoutingShape


@dataclass(frozen=True, kw_only=True)
class ToSample:
    """Responses that an engine is to sample as the run does.

    Args:
        prompts: Token ids of each prompt, as the trainer has them.
        responses: Smallest number of responses; every prompt gets equally many.
        max_tokens: Largest number of tokens of a response.
        sampling: Sampling settings of the run's requests, by the engine's names.
        seen: Token ids of each prompt as the engine gets them; None if they are the trainer's.
    """

    prompts: Sequence[Sequence[int]]
    responses: int
    max_tokens: int
    sampling: Mapping[str, Any]
    seen: Sequence[Sequence[int]] | None = None

    @property
    def of_each(self) -> int:
        """Number of responses of each prompt."""
        return -(-self.responses // len(self.prompts))

    @property
    def given(self) -> list[list[int]]:
        """Token ids of each prompt as the engine gets them."""
        return [list(prompt) for prompt in (self.prompts if self.seen is None else self.seen)]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each prompt with its response, if no response ends early."""
        return [len(prompt) + self.max_tokens for prompt in self.given for _ in range(self.of_each)]

    @property
    def settings(self) -> SamplingSettings:
        """Sampling settings for the records of these responses."""
        return SamplingSettings(temperature=float(self.sampling.get("temperature", 1.0)))

    def routed(self, shape: RoutingShape | None) -> RoutingShape | None:
        """Return the shape of the routes that can be read, if the engine records any.

        If the engine sees other prompts, the rows of its routes are not the trainer's, and the result is None.
        """
        return shape if self.seen is None else None

    def sampled(self, records: Sequence[RolloutRecord]) -> Sample:
        """Return the engine's responses as a sample, with the trainer's prompts.

        Args:
            records: Records of all responses, with those of one prompt next to each other; empty responses are left out.

        Raises:
            RecordError: As in `Sample`.
        """
        if self.seen is not None:
            owners = [np.array(prompt, dtype=np.int64) for prompt in self.prompts for _ in range(self.of_each)]
            records = [replace(record, prompt_ids=owner) for record, owner in zip(records, owners, strict=True)]
        return Sample.of([record for record in records if len(record.response_ids)])


def sequences(sample: Sample) -> list[list[int]]:
    """Return the token ids of each prompt with its response."""
    return [[*prompt, *response] for prompt, response in zip(sample.prompts, sample.responses, strict=True)]
