"""Which version of the weights sampled each token of a response.

If a weight update interrupts an engine, the engine computes its cache again and goes on with the new weights. Each token thus has
exactly one version, and a response consists of a few segments, each of one version.

Shapes: B responses, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_ext.errors import RecordError

UNKNOWN = -1
"""Version of a token if nobody says which weights sampled it."""


@dataclass(frozen=True)
class Segment:
    """Tokens of a response that one version of the weights sampled, up to the next segment.

    Args:
        version: Version of the weights, >= 0; None if nobody says.
        start: Index of the segment's first token in the response, >= 0. Tokens that the policy did not sample (a tool's) count.

    Raises:
        RecordError: A number is negative.
    """

    version: int | None
    start: int

    def __post_init__(self) -> None:
        if self.start < 0 or (self.version is not None and self.version < 0):
            raise RecordError(f"segment of version {self.version!r} from token {self.start}: both must be >= 0.")


def segments_of_span(first: int | None, last: int | None) -> list[Segment]:
    """Return the segments of a response if only the versions at its first and last token are known.

    Args:
        first: Version at the first token; None if nobody says.
        last: Version at the last token.

    Returns:
        One segment of that version; of version None if the two differ, because nobody says at which token the weights changed.
    """
    return [Segment(first if first == last else None, 0)]


def token_versions(segments: Sequence[Sequence[Segment]], mask: Tensor) -> Tensor:
    """Return the version of the weights that sampled each token.

    A segment ends where the next one in the list begins. A segment that begins inside an earlier one replaces the tokens there,
    for example when a chat template removes generated tokens before the next turn.

    Args:
        segments: The segments of each response, in order of time; an empty list if nothing is known.
        mask: True, or 1, at tokens that the policy sampled `[B, T]`.

    Returns:
        Versions `[B, T]`, int64; `UNKNOWN` where nobody says, and at tokens that the policy did not sample.

    Raises:
        RecordError: There are not B lists.
    """
    if mask.dim() != 2 or len(segments) != len(mask):
        raise RecordError(
            f"{len(segments)} lists of segments do not fit a mask of shape {tuple(mask.shape)}; give one list for each response."
        )
    found = torch.full(mask.shape, UNKNOWN, dtype=torch.int64)
    for row, parts in enumerate(segments):
        for part in parts:
            found[row, part.start :] = UNKNOWN if part.version is None else part.version
    return found.to(mask.device).masked_fill(~mask.bool(), UNKNOWN)


def of_one_version(versions: Tensor, mask: Tensor) -> Tensor:
    """Return True at the tokens up to which one version sampled the whole response `[B, T]`, bool.

    After the first change of version, the engine computes its cache again: the new weights choose other experts for the earlier
    tokens than the weights that sampled those. A trainer that replays the recorded experts then cannot score the later tokens as
    the engine did, whatever weights it has.

    Args:
        versions: Versions from `token_versions` `[B, T]`.
        mask: True, or 1, at tokens that the policy sampled `[B, T]`.
    """
    sampled = mask.bool()
    first = versions.gather(1, sampled.long().argmax(1, keepdim=True))
    return (sampled & (versions != first)).cumsum(1) == 0


def staleness(versions: Tensor, scoring: int) -> Tensor:
    """Return by how many versions the weights that score are newer than those that sampled.

    Args:
        versions: Version of each token, such as `token_versions` returns.
        scoring: Version of the weights that score.

    Returns:
        The difference for each of the n tokens that have a version, flattened: `[n]`, int64.
    """
    return scoring - versions[versions != UNKNOWN]
