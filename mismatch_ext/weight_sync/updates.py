"""Verified weight updates of a plain training loop; each engine's adapter says how weights are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from mismatch_ext.config import MonitorConfig
from mismatch_ext.fingerprint import fingerprint
from mismatch_ext.precision.dtypes import canonical
from mismatch_ext.weight_sync.checker import SyncVerdict
from mismatch_ext.weight_sync.verifier import DECODE_TOKENS, Sampled, WeightVerifier

NamedTensors = Iterable[tuple[str, Tensor]]


class Updating(TypedDict):
    """What `VerifiedUpdates` takes by keyword; engines hand it on whole."""

    probes: Tensor
    dtype: str | torch.dtype
    trainer_dtype: NotRequired[str | torch.dtype | None]
    version: NotRequired[int]
    decode_tokens: NotRequired[int]


class VerifiedUpdates(ABC):
    """Sends the trainer's weights, and checks each time that the engine computes with them.

    Both sides score fixed probe tokens; `weight_sync/checker.py` says how stale and garbled weights are told from numerics.
    The engine must hold the trainer's weights when this is built.

    Args:
        rollout: The engine.
        parameters: Returns checkpoint names and tensors each time that it is called.
        score: Maps probe tokens `[N, T]` to the trainer's log-probabilities `[N, T-1]` at temperature 1.
        probes: Probe tokens `[N, T]`, int64.
        dtype: The engine's dtype.
        trainer_dtype: The trainer's compute dtype; None if it is the engine's or finer.
        version: Number of updates begun so far.
        decode_tokens: The engine decodes this many tokens instead of each probe's last ones, and they are compared with its
            prefill; 0 for none.
    """

    def __init__(
        self,
        rollout: Sampled,
        parameters: Callable[[], NamedTensors],
        score: Callable[[Tensor], Tensor],
        *,
        probes: Tensor,
        dtype: str | torch.dtype,
        trainer_dtype: str | torch.dtype | None = None,
        version: int = 0,
        decode_tokens: int = DECODE_TOKENS,
    ) -> None:
        self.parameters, self.score = parameters, score
        self.probes, self.dtype, self.version = probes, canonical(dtype), version
        self.verifier = WeightVerifier(
            self,
            rollout,
            MonitorConfig(),
            probes,
            dtype=dtype,
            trainer_dtype=trainer_dtype,
            decode_tokens=decode_tokens,
        )
        self.verifier.begin()

    @abstractmethod
    def _send(self) -> Mapping[str, Any]:
        """Send the trainer's weights as `version`; return samples of what was sent, for the engine's `compare`."""

    def fingerprint(self) -> str:
        """Return a digest of the trainer's present weights."""
        return fingerprint(self.parameters())

    def update(self) -> SyncVerdict:
        """Send the trainer's weights and verify them.

        The version is counted up before anything is sent, so that no version stands for two sets of weights.

        Raises:
            WeightSyncError: The engine holds stale or garbled weights.
            MismatchError: The engine's `update_weights` raised it.
        """
        self.version += 1
        return self.verifier.verify(self._send())

    def verify(self) -> SyncVerdict:
        """Judge whether the engine holds the trainer's present weights, whoever sent them; a bad verdict raises nothing."""
        return self.verifier.judge()


def in_parts(tensors: NamedTensors, most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield tensors in parts of as many as a request may hold, in their order.

    Args:
        tensors: Names and tensors.
        most: Bytes of a part; a larger tensor is a part of its own.
    """
    part: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in tensors:
        if part and held + tensor.nbytes > most:
            yield part
            part, held = [], 0
        part.append((name, tensor))
        held += tensor.nbytes
    if part:
        yield part
