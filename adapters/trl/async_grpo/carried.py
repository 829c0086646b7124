"""What a rollout carries besides its tokens: the version of each token's weights, and routes.

TRL's rollout process makes rows of conversations, forks and masks them, and hands them to the trainer; a log-probability that
knows its version survives all of that. From there to the collator, a rollout's metrics are handed on by reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch_ext.drift import UNKNOWN


@dataclass(eq=False)
class Turn:
    """One answer of the model, from its first request to its last.

    Args:
        routes: Experts of the prompt and of the answer without its last token, as the engine chose them in the last request,
            `[rows, L, K]`; None where none are recorded.
        step: Version of the weights of the last request. All the routes are of this version, because a request that continues
            an answer has the answer so far in its prompt.
    """

    routes: NDArray[Any] | None
    step: int


class Sampled(float):
    """A log-probability of a sampled token that knows where it comes from.

    Attributes:
        step: Version of the weights that sampled the token.
        turn: The answer that it is a part of.
    """

    __slots__ = ("step", "turn")

    step: int
    turn: Turn

    @classmethod
    def of(cls, values: Sequence[float], step: int, turn: Turn) -> list[Sampled]:
        """Return log-probabilities of one request."""
        found = []
        for value in values:
            sampled = cls(value)
            sampled.step, sampled.turn = step, turn
            found.append(sampled)
        return found


class Carried(dict[str, float]):
    """A rollout's metrics, with what else its row of tokens carries.

    Attributes:
        versions: Version of each token's weights `[S]`, int64; `UNKNOWN` at tokens that the policy did not sample.
        routes: As in `Turn`; None where there are none.
        routes_step: Version of the weights that chose the routes.
    """

    versions: NDArray[np.int64]
    routes: NDArray[Any] | None = None
    routes_step: int = UNKNOWN

    @classmethod
    def along(cls, metrics: Mapping[str, float], logprobs: Sequence[float]) -> Carried:
        """Return metrics with what the log-probabilities of a row know.

        Args:
            metrics: The rollout's.
            logprobs: One for each of the row's tokens; a plain float where the token was not sampled, or is context by now.
        """
        carried = cls(metrics)
        carried.versions = np.array([getattr(value, "step", UNKNOWN) for value in logprobs], dtype=np.int64)
        turns = {id(value.turn): value.turn for value in logprobs if isinstance(value, Sampled)}
        if len(turns) == 1:
            (turn,) = turns.values()
            carried.routes, carried.routes_step = turn.routes, turn.step
        return carried
