"""Which version of the weights sampled each token of a response.

An engine that is interrupted by a weight update goes on with the new weights, its cache computed anew: each token has exactly one
version, and a response is a few segments of one version each.

Shapes: B responses, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_ext.errors import RecordError

UNKNOWN = -1
"""Version of a token of which nobody says with which weights it was sampled."""


@dataclass(frozen=True)
class Segment:
    """Tokens of a response that one version of the weights sampled, up to the next segment.

    Args:
        version: Version of the weights, >= 0; None where nobody says.
        start: Index of the first token in the response, >= 0, of tokens that the policy did not sample (a tool's) too.

    Raises:
        RecordError: A number is negative.
    """

    version: int | None
    start: int

    def __post_init__(self) -> None:
        if self.start < 0 or (self.version is not None and self.version < 0):
            raise RecordError(f"segment of version {self.version!r} from token {self.start}: both must be >= 0.")


def segments_of_span(first: int | None, last: int | None) -> list[Segment]:
    """Return the segments of a response of which only the versions at its first and last token are known.

    Args:
        first: Version at the first token; None where nobody says.
        last: Version at the last token.

    Returns:
        One segment of that version, or of an unknown one where the two differ: at which token the weights changed, nobody says.
    """
    return [Segment(first if first == last else None, 0)]


def token_versions(segments: Sequence[Sequence[Segment]], mask: Tensor) -> Tensor:
    """Return the version of the weights that sampled each token.

    A segment ends where the next one in the list begins. One that begins before the end of those in front of it takes their
    tokens' place, as where a chat template takes generated tokens back before the next turn.

    Args:
        segments: Those of each response, in the order of time; none where nothing is known.
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
    """Return where a response has been sampled by one version from its first token on `[B, T]`, bool.

    Behind that, an engine's cache is of other weights than those that sampled what it holds: they chose other experts there, and
    a trainer that replays the recorded ones cannot score these tokens as the engine did, whatever weights it has.

    Args:
        versions: As `token_versions` returns them `[B, T]`.
        mask: True, or 1, at tokens that the policy sampled `[B, T]`.
    """
    sampled = mask.bool()
    first = versions.gather(1, sampled.long().argmax(1, keepdim=True))
    return (sampled & (versions != first)).cumsum(1) == 0


def staleness(versions: Tensor, scoring: int) -> Tensor:
    """Return by how many versions the weights that score are newer than those that sampled.

    Args:
        versions: Of each token, such as `token_versions` returns.
        scoring: Version of the weights that score.

    Returns:
        Of each token that has a version, in no shape: `[n]`, int64.
    """
    return scoring - versions[versions != UNKNOWN]
