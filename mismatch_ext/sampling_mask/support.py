"""The support of each position of a response: the tokens that the engine could have sampled there, as lists of ids.

Shapes: T positions, M ids over all positions, K ids of the widest position, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_ext.errors import RecordError


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSupport:
    """The token ids from which each position was sampled.

    An id takes 2 bytes for a vocabulary of up to 32,768 tokens and 4 bytes above; a position takes 8 more. A bitmask would take
    V/8 bytes per position: 19 kB for 152,000 tokens, where 64 ids take 264 bytes.

    Args:
        ids: Ids of all positions in order `[M]`, int16 or int32, ascending within a position.
        offsets: Index in `ids` of the first id of each position, then M `[T+1]`, int64. A position without ids was not sampled,
            for example a tool's token or padding.
        vocabulary: V, the number of tokens that have logits.
    """

    ids: Tensor
    offsets: Tensor
    vocabulary: int

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], vocabulary: int, name: str = "") -> TokenSupport:
        """Store lists of token ids.

        Args:
            rows: Ids of each position, in any order; an empty list for a position that was not sampled.
            vocabulary: V.
            name: The response's name, used in messages.

        Raises:
            RecordError: An id is not in the vocabulary, or occurs twice at one position; names response and token.
        """
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        flat = torch.tensor([one for row in rows for one in row], dtype=torch.int64)
        return cls.from_places(flat, torch.repeat_interleave(counts), len(rows), vocabulary, name)

    @classmethod
    def from_places(cls, ids: Tensor, places: Tensor, positions: int, vocabulary: int, name: str = "") -> TokenSupport:
        """Store token ids with the position of each, in any order.

        Args:
            ids: Ids `[M]`, any integer dtype.
            places: Position of each id `[M]`, int64.
            positions: T.
            vocabulary: V.
            name: The response's name, used in messages.

        Raises:
            RecordError: As `from_lists`.
        """
        for bad in ((ids < 0) | (ids >= vocabulary)).nonzero()[:1, 0].tolist():
            raise RecordError(
                f"rollout {name}, token {int(places[bad])}: its sampling mask lists id {int(ids[bad])}; allowed: 0 to "
                f"{vocabulary - 1}."
            )
        keys = (places * vocabulary + ids).sort().values
        for twice in (keys.diff() == 0).nonzero()[:1, 0].tolist():
            raise RecordError(
                f"rollout {name}, token {int(keys[twice]) // vocabulary}: its sampling mask lists an id twice."
            )
        offsets = torch.zeros(positions + 1, dtype=torch.int64)
        offsets[1:] = torch.bincount(places, minlength=positions).cumsum(0)
        return cls(ids=(keys % vocabulary).to(_narrow(vocabulary)), offsets=offsets, vocabulary=vocabulary)

    @classmethod
    def from_mask(cls, mask: Tensor) -> TokenSupport:
        """Store a dense mask `[T, V]`, True at tokens that could be sampled."""
        places = mask.nonzero()
        offsets = torch.zeros(len(mask) + 1, dtype=torch.int64)
        offsets[1:] = mask.sum(-1).cumsum(0)
        return cls(ids=places[:, 1].to(_narrow(mask.shape[1])).cpu(), offsets=offsets, vocabulary=mask.shape[1])

    @classmethod
    def empty(cls, positions: int, vocabulary: int) -> TokenSupport:
        """Return positions without ids, at which nothing was sampled."""
        return cls.from_lists([()] * positions, vocabulary)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Tensor:
        """Number of ids per position `[T]`, int64."""
        return self.offsets.diff()

    def slice(self, start: int, stop: int) -> TokenSupport:
        """Return the positions from `start` up to, not including, `stop`."""
        offsets = self.offsets[start : stop + 1]
        ids = self.ids[int(offsets[0]) : int(offsets[-1])]
        return TokenSupport(ids=ids, offsets=offsets - offsets[0], vocabulary=self.vocabulary)

    def padded(self, length: int) -> TokenSupport:
        """Return `length` positions: the first ones of this support, then empty ones if it has too few."""
        if length <= len(self):
            return self.slice(0, length)
        return join([self, TokenSupport.empty(length - len(self), self.vocabulary)])

    def rows(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ids of some positions as a rectangle `[stop - start, K]`, int64, and True where it has an id, bool."""
        counts = self.counts[start:stop].to(device)
        width = max(int(counts.max()), 1) if len(counts) else 1
        held = torch.arange(width, device=device) < counts[:, None]
        ids = torch.zeros(held.shape, dtype=torch.int64, device=device)
        ids[held] = self.ids[int(self.offsets[start]) : int(self.offsets[stop])].to(device).long()
        return ids, held

    def check_sampled(self, tokens: Sequence[int], mask: Sequence[bool], name: str) -> None:
        """Refuse a response if a sampled token is not in the support of its position.

        Args:
            tokens: The response `[T]`.
            mask: True at tokens that the policy sampled `[T]`.
            name: The response's name.

        Raises:
            RecordError: The numbers of positions and tokens differ, or a sampled token is not in its support; names response and
                token.
        """
        if len(tokens) != len(self):
            raise RecordError(
                f"rollout {name}: {len(tokens)} response tokens and sampling masks of {len(self)} positions; one of each is "
                "needed."
            )
        sampled = torch.tensor(tokens, dtype=torch.int64)
        inside = torch.zeros(len(self), dtype=torch.bool)
        place = torch.repeat_interleave(torch.arange(len(self)), self.counts)
        inside[place[self.ids.long() == sampled[place]]] = True
        if bool((outside := torch.tensor(mask, dtype=torch.bool) & ~inside).any()):
            token = int(outside.nonzero()[0])
            held = int(self.counts[token])
            raise RecordError(
                f"rollout {name}, token {token} (id {tokens[token]}): it is not among the {held} tokens of its sampling mask, so "
                "that it could not have been sampled; masks and tokens are of different requests or positions."
            )


def join(parts: Sequence[TokenSupport]) -> TokenSupport:
    """Return the positions of several supports, one after the other.

    Raises:
        RecordError: `parts` is empty, or the supports have different vocabularies.
    """
    sizes = sorted({part.vocabulary for part in parts})
    if len(sizes) != 1:
        raise RecordError(f"sampling masks over vocabularies of {sizes} tokens cannot be joined; allowed: one size.")
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), *(part.counts for part in parts)])
    return TokenSupport(ids=torch.cat([part.ids for part in parts]), offsets=counts.cumsum(0), vocabulary=sizes[0])


def _narrow(vocabulary: int) -> torch.dtype:
    return torch.int16 if vocabulary <= 1 << 15 else torch.int32
