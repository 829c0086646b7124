"""Rollouts as a host logged them, before the model that will score them is loaded.

Shapes: R rows (tokens with a recorded route), L layers, K experts per token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch_ext.doctor.sample import Sample
from mismatch_ext.errors import RecordError, RoutingError
from mismatch_ext.routing import RoutingShape, RoutingTrace

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class LoggedRoutes:
    """Experts of one response's tokens, as they are in a file.

    Args:
        experts: Expert ids `[R, L, K]`, of the MoE layers or of all layers.
        start: Position of row 0 in the sequence.
        layers: Absolute indices of the MoE layers; None if the file does not say.
        num_experts: Number of experts per layer; None if the file does not say.
    """

    experts: NDArray[np.integer[Any]]
    start: int = 0
    layers: tuple[int, ...] | None = None
    num_experts: int | None = None

    def trace(self, shape: RoutingShape, tokens: tuple[int, ...], where: str) -> RoutingTrace:
        """Return the routes as a trace for a model.

        Args:
            shape: The model's routing shape.
            tokens: Ids of prompt and response.
            where: Name of the response, for messages.

        Raises:
            RoutingError: The routes belong to another model or to other tokens.
        """
        for name, mine, theirs in (
            ("MoE layers", self.layers, shape.layers),
            ("experts per layer", self.num_experts, shape.num_experts),
        ):
            if mine is not None and mine != theirs:
                raise RoutingError(
                    f"{where}: its routes are of {name} {mine}, the model has {theirs}; give the model that was sampled."
                )
        return RoutingTrace.ingest(
            self.experts,
            num_experts=shape.num_experts,
            layers=shape.layers,
            top_k=shape.top_k,
            tokens=tokens,
            version=0,
            request=where,
            start=self.start,
        )


@dataclass(frozen=True, kw_only=True)
class LoggedResponse:
    """One response.

    Args:
        where: Its place in the file, for messages.
        prompt_ids: Ids of the tokens before the first sampled token.
        response_ids: Ids of the first sampled token and all tokens after it `[T]`.
        mask: True where the policy sampled a token `[T]`.
        logprobs: The engine's log-probabilities in nats `[T]`; NaN where there is none.
        versions: Versions of the weights that sampled it; empty if the file does not say.
        settings: Its sampling settings in the file, such as `temperature` and `dtype`.
        routes: The engine's experts; None if the file has none.
    """

    where: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    routes: LoggedRoutes | None = None

    @property
    def version(self) -> str:
        """The version of the weights that sampled it; several versions are joined by a plus."""
        return "+".join(dict.fromkeys(self.versions)) or UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Responses of one file.

    Args:
        path: The file, for messages.
        host: The host that writes this format.
        responses: The responses that have tokens sampled by the policy.
        left_out: How many responses were dropped, for example because they were aborted and have no sampled token.
    """

    path: str
    host: str
    responses: tuple[LoggedResponse, ...]
    left_out: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The sampling settings in the file, which must be the same for all responses.

        Raises:
            RecordError: A setting differs between responses; names the setting and both responses.
        """
        found: dict[str, tuple[Any, str]] = {}
        for response in self.responses:
            for name, value in response.settings.items():
                first, where = found.setdefault(name, (value, response.where))
                if first != value:
                    raise RecordError(
                        f"{response.where} was sampled with {name}={value}, and {where} with {first}: the doctor compares one "
                        "way of sampling with the trainer; split the file."
                    )
        return {name: value for name, (value, _) in found.items()}

    def of_version(self, version: str | None) -> Logged:
        """Return the responses that one version of the weights sampled.

        Args:
            version: The version; None if all responses have the same version.

        Raises:
            RecordError: There are several versions and none was chosen, or no response has the chosen one.
        """
        counts = Counter(response.version for response in self.responses)
        said = ", ".join(f"{name} ({count} responses)" for name, count in sorted(counts.items()))
        if version is None and len(counts) > 1:
            raise RecordError(
                f"{self.path} holds responses of several weight versions: {said}; one checkpoint is compared with those of one "
                "version: choose it with --weight-version, and give --model its checkpoint."
            )
        if version is None:
            return self
        kept = tuple(response for response in self.responses if response.version == version)
        if not kept:
            raise RecordError(
                f"{self.path} holds no response of weight version {version}; it has {said or 'none at all'}."
            )
        return replace(self, responses=kept, left_out=self.left_out + len(self.responses) - len(kept))

    def sample(self, shape: RoutingShape | None = None) -> Sample:
        """Return what the doctor compares.

        Args:
            shape: The model's routing shape; None for a model without experts.

        Raises:
            RecordError: Some responses have routes and others have none; or as in `Sample`.
            RoutingError: The routes do not belong to this model.
        """
        routed = [response for response in self.responses if response.routes is not None]
        if routed and len(routed) != len(self.responses):
            raise RecordError(
                f"{self.path}: {len(routed)} of {len(self.responses)} responses have routes; allowed: all of them or none."
            )
        if routed and shape is None:
            raise RoutingError(
                f"{self.path} holds routes, and the model has no experts; give the model that was sampled."
            )
        return Sample(
            prompts=tuple(response.prompt_ids for response in self.responses),
            responses=tuple(response.response_ids for response in self.responses),
            masks=tuple(response.mask for response in self.responses),
            logprobs=tuple(response.logprobs for response in self.responses),
            routes=tuple(
                response.routes.trace(shape, (*response.prompt_ids, *response.response_ids), response.where)
                for response in routed
                if response.routes is not None and shape is not None
            )
            or None,
        )

    def said(self, experts: bool) -> str:
        """Return a sentence that says what was read.

        Args:
            experts: Whether the model has experts.
        """
        versions = sorted({response.version for response in self.responses} - {UNKNOWN})
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        parts = [f"{len(self.responses)} logged responses of {self.host}"]
        parts += [f"{self.left_out} left out"] * bool(self.left_out)
        parts += [f"weight version {', '.join(versions)}"] * bool(versions)
        parts += [f"sampled with {', '.join(settings)}"] * bool(settings)
        without = experts and all(response.routes is None for response in self.responses)
        parts += ["no routes in the file: what the trainer's own routes change counts as the engine's error"] * without
        return "; ".join(parts)


def split(
    tokens: tuple[int, ...], mask: tuple[bool, ...], logprobs: tuple[float, ...], where: str
) -> dict[str, Any] | None:
    """Split a sequence before its first sampled token, for hosts that do not tell prompt and response apart.

    Args:
        tokens: Ids of the sequence `[S]`.
        mask: True at sampled tokens `[S]`.
        logprobs: Log-probabilities in nats `[S]`; values at other tokens do not matter.
        where: Name of the response, for messages.

    Returns:
        Fields of a `LoggedResponse`; None if no token was sampled.

    Raises:
        RecordError: Lengths differ, or there is no token before the first sampled one.
    """
    if len({len(tokens), len(mask), len(logprobs)}) != 1:
        raise RecordError(
            f"{where}: {len(tokens)} tokens, {len(mask)} mask values and {len(logprobs)} log-probabilities; the three must be "
            "equal."
        )
    if not any(mask):
        return None
    first = mask.index(True)
    if first == 0:
        raise RecordError(f"{where}: its first token is sampled already; a prompt must have a token.")
    return {
        "where": where,
        "prompt_ids": tokens[:first],
        "response_ids": tokens[first:],
        "mask": mask[first:],
        "logprobs": tuple(p if kept else math.nan for p, kept in zip(logprobs, mask, strict=True))[first:],
    }
