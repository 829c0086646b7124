"""The base class of servers that serve as the doctor's engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.server.detect import Server

from mismatch_ext.doctor import Sample
from mismatch_ext.routing import RoutingShape, RoutingTrace


class ServedEngine(ABC):
    """A server in the role of the doctor's engine.

    Args:
        server: The server, and what it reports of itself.
        shape: Shape of the routes, which are read if the server sends them; None for a model without experts.
    """

    def __init__(self, server: Server, shape: RoutingShape | None = None) -> None:
        self.server, self._shape = server, shape

    @abstractmethod
    def sample(self, asked: ToSample) -> Sample:
        """Sample responses as the run does.

        Args:
            asked: Prompts and settings; if the settings have a seed, each response is still drawn with noise of its own.

        Raises:
            ConfigError: The server refuses a request.
            EngineError: The server is not reached, fails, or holds weights that are not finite.
            RecordError: An answer is malformed.
        """

    @abstractmethod
    def score(self, sample: Sample) -> Sample:
        """Return the same tokens with the log-probabilities that the server gives them as part of a prompt, at temperature 1."""

    def shutdown(self) -> None:  # noqa: B027 - nothing was started
        """Do nothing, because the doctor did not start the server."""

    def notes(self, model: str, sample: Sample) -> tuple[str, ...]:
        """Return sentences on what the server reports, does not report, and did not send.

        Args:
            model: Checkpoint that the trainer holds.
            sample: Responses that the server sampled.
        """
        notes = self.server.notes(model)
        if self._shape is not None and sample.routes is None:
            notes += (
                "the server sent no routes: what its experts' routes make of the gap counts as the engine's; start it with "
                "--enable-return-routed-experts",
            )
        return notes

    def _trace(self, ids: Sequence[int], experts: Any, row: int, *, last_row: bool) -> RoutingTrace | None:
        """Return the routes of a sequence; None if the server sent none, or if none are read."""
        if self._shape is None or experts is None:
            return None
        return RoutingTrace.ingest(
            experts,
            num_experts=self._shape.num_experts,
            layers=self._shape.layers,
            tokens=list(ids),
            version=0,
            request=str(row),
            top_k=self._shape.top_k,
            last_row=last_row,
        )


def whole(traces: Sequence[RoutingTrace | None]) -> tuple[RoutingTrace, ...] | None:
    """Return the routes if every response has them, otherwise None."""
    present = tuple(trace for trace in traces if trace is not None)
    return present if present and len(present) == len(traces) else None
