"""The processes that train together: the protocol for measuring over all of them, and how they agree on an error."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_ext import errors


@runtime_checkable
class Ranks(Protocol):
    """The processes that train together."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of their ranks; all of them must call it."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor, which may be on the CPU, over all processes; all of them must call it."""


class OneProcess:
    """`Ranks` of a trainer in one process."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """Return a list of this one value."""
        return [value]

    def sum(self, values: Tensor) -> Tensor:
        """Return the values as they are."""
        return values


ONE_PROCESS = OneProcess()


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks; all ranks must call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class WorldRanks:
    """`Ranks` of the processes of torch.distributed's world."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of their ranks; all of them must call it."""
        return gathered(value)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes; all of them must call it."""
        if self.size == 1:
            return values
        # NCCL takes no tensors of the CPU.
        total = (values.cuda() if dist.get_backend() == "nccl" else values).clone()
        dist.all_reduce(total)
        return total.to(values.device)


WORLD = WorldRanks()


def agree(error: Exception | None, ranks: Ranks = WORLD, flags: Sequence[bool] = ()) -> list[bool]:
    """Raise on every rank if one failed, a failed one its own error, others one of its class that names the rank; all call it.

    Returns which flags are set on any rank. All ranks give the same number of them.
    """
    if ranks.size == 1:
        if error is not None:
            raise error
        return list(flags)
    # One number tells whether there is anything to say.
    counts = ranks.sum(torch.tensor([float(error is not None), *map(float, flags)]))
    anywhere = [bool(count) for count in counts[1:]]
    if not bool(counts[0]):
        return anywhere
    # In words, because not every error survives a pickle.
    gathered_words = ranks.gather(None if error is None else _in_words(error))
    failed = [(rank, *words) for rank, words in enumerate(gathered_words) if words is not None]
    bugs = [words for words in failed if words[1] == errors.OtherRankError.__name__]
    # A rank that ends by a bug must not be waited for, whatever else the others have found.
    if bugs and (error is None or isinstance(error, errors.MismatchError)):
        rank, _, message = bugs[0]
        raise errors.OtherRankError(f"rank {rank}: {message}") from error
    if error is not None:
        raise error
    for rank, name, message in failed:
        raise getattr(errors, name)(f"rank {rank}: {message}")
    return anywhere


def _in_words(error: Exception) -> tuple[str, str]:
    """Return the name of an error's class, or of the base of it that every rank knows, and its message.

    An error that is not this package's stays one on the other ranks, which must not go on where this one has ended.
    """
    known = next((kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__), None)
    return ("OtherRankError", f"{type(error).__name__}: {error}") if known is None else (known.__name__, str(error))


def _cause(words: str) -> str:
    """Return the message of an error, without the ranks and classes before it."""
    return re.sub(r"^(?:(?:rank \d+|\w+): ?)*", "", words)


_trainings = itertools.count(1)


def number_of_training(ranks: Ranks) -> int:
    """Return the number of a training that begins, the same on all of its ranks, which all call this; 0 if it has only one."""
    return next(_trainings) if ranks.size > 1 else 0


def first_error(error: BaseException, training: int) -> str:
    """Return the words of the error that ended a training on the first rank to fail; a later one gets them as a note of its own.

    The others see no more than a lost connection; what the rank left in the store by which they have met tells why. `training` is
    what `number_of_training` returned: ranks may have failed unequally often before.
    """
    of_this_rank = f"{type(error).__name__}: {error}"
    if not training or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return of_this_rank
    here = f"rank {dist.get_rank()}: {of_this_rank}"
    try:
        store = dist.distributed_c10d._get_default_store()
        first = store.compare_set(f"mismatch_ext/error/{training}", "", here).decode()
    except Exception:  # noqa: BLE001  # the store went with the rank that held it
        return of_this_rank
    if _cause(first) == _cause(of_this_rank):
        return of_this_rank  # it was first, or all ranks have agreed on it
    error.add_note(f"This rank failed after {first}")
    return first


@dataclass
class Flags:
    """What a rank tells all others while it agrees with them on an error.

    Attributes:
        here: This rank's flags, which it sets.
        anywhere: Which of them any rank has set, once all ranks have agreed.
    """

    here: list[bool]
    anywhere: list[bool] = field(default_factory=list)


@contextmanager
def together(ranks: Ranks, flags: int = 0) -> Iterator[Flags]:
    """Run this rank's part of what all ranks do; if it fails on one rank, raise on all of them, as `agree` does.

    Gives so many flags, which travel with the agreement and take no collective of their own.
    """
    error: Exception | None = None
    told = Flags([False] * flags)
    try:
        yield told
    except Exception as raised:  # noqa: BLE001  # whatever it is, the other ranks must not wait
        error = raised
    told.anywhere = agree(error, ranks, told.here)
