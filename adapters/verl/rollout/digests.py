"""R3's routes with the tokens that they are of: each row carries a digest of its token and of all before it.

Agent loops, verl's queue and its batches move routes by position. A row's digest moves with it, as further layers behind the
model's own, so that the engine which replays a row can tell whether it is of the tokens that it is given.

Shapes: T tokens, R rows, L layers, D further layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

BYTES = 4
"""Bytes of a digest, a byte in a slot: engines and verl keep expert ids in eight bits or more."""


class Numbers:
    """The digests of a sequence that grows, of which each token is read once."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._sums = np.zeros(0, np.uint64)  # over each token and all before it

    def of(self, tokens: Sequence[int]) -> NDArray[np.uint32]:
        """Return a digest for each token `[T]`, of the token and of all before it; none is zero."""
        tokens = list(tokens)
        known = len(self._tokens)
        if tokens[:known] != self._tokens:
            known = 0
        last = self._sums[known - 1] if known else np.uint64(0)
        sums = np.cumsum(_mixed(_placed(tokens[known:], known)), dtype=np.uint64) + last
        self._tokens, self._sums = tokens, np.concatenate([self._sums[:known], sums])
        return _folded(self._sums)


def numbers(tokens: Sequence[int] | NDArray[Any]) -> NDArray[np.uint32]:
    """Return a digest for each token `[T]`, of the token and of all before it; none is zero."""
    return _folded(np.cumsum(_mixed(_placed(tokens, 0)), dtype=np.uint64))


def _placed(tokens: Sequence[int] | NDArray[Any], first: int) -> NDArray[np.uint64]:
    """Return tokens with their places, of which the first is `first`."""
    ids = np.asarray(tokens, np.uint64)
    return ids | (np.arange(first, first + len(ids), dtype=np.uint64) << np.uint64(32))


def _folded(sums: NDArray[np.uint64]) -> NDArray[np.uint32]:
    return (_mixed(sums) >> np.uint64(32)).astype("<u4") | np.uint32(1)


def digests(tokens: Sequence[int] | NDArray[Any], of: Numbers | None = None) -> NDArray[np.uint8]:
    """Return the bytes of each token's digest `[T, BYTES]`, uint8; `of` knows those of earlier tokens."""
    found = numbers(tokens) if of is None else of.of(list(tokens))
    return found.view(np.uint8).reshape(-1, BYTES)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of SplitMix64 (Steele et al., OOPSLA 2014) of each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def with_digests(routes: Any, tokens: Sequence[int], of: Numbers | None = None) -> NDArray[Any]:
    """Return an answer's routes `[R, L + D, K]` with digests of its tokens, prompt too; zeros if rows are missing or surplus.

    `of` knows the digests of earlier tokens.
    """
    routes = np.asarray(routes)
    rows, _, top_k = routes.shape
    further = _layers(top_k)
    layers = np.zeros((rows, further * top_k), routes.dtype)
    if rows in (len(tokens) - 1, len(tokens)):  # otherwise nobody says which token a row is of
        layers[:, :BYTES] = digests(tokens, of)[:rows]
    return np.concatenate([routes, layers.reshape(rows, further, top_k)], axis=1)


def without_digests(routes: Tensor) -> Tensor:
    """Return the routes `[..., L, K]` alone."""
    return routes[..., : max(routes.shape[-2] - _layers(routes.shape[-1]), 0), :]


def proven(routes: Tensor, tokens: Tensor) -> tuple[int, bool]:
    """Return how many rows of routes with digests, from the first on, are of these tokens `[T]`, and whether the next has others.

    A next row without a digest was not recorded.
    """
    slots = routes[: len(tokens), without_digests(routes).shape[1] :].flatten(1).cpu().numpy()
    if slots.shape[1] < BYTES:  # fewer layers than a digest takes
        return 0, True
    # Each row's slots are copied as one value: the rows lie far apart, and one after another takes twice the time.
    together = np.ascontiguousarray(slots[:, :BYTES].view(f"V{BYTES * slots.itemsize}"))
    found = together.view(slots.dtype).astype(np.uint8).view("<u4")[:, 0]
    wrong = found != numbers(tokens.cpu().numpy())[: len(found)]
    rows = int(wrong.argmax()) if wrong.any() else len(found)
    return rows, rows < len(found) and bool(found[rows])


def _layers(top_k: int) -> int:
    return -(-BYTES // top_k)
