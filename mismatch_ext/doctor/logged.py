"""Responses that were read from a log, with the engine's log-probabilities; `log_formats.py` reads them.

Shapes: R rows (tokens with a recorded route), L layers, K experts per token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mismatch_ext.doctor.sample import Floats, Sample
from mismatch_ext.errors import RecordError, RoutingError
from mismatch_ext.gap import k3
from mismatch_ext.routing import RoutingShape, RoutingTrace

UNKNOWN = "unknown"
OWN = "mismatch-ext's own format"
FILE = "the file's"
"""The step of frameworks that write a file for each."""
LATE = {
    True: "staleness: {beyond}. Sync weights more often or lower the learning rate; no setting of the engine changes it",
    False: "steps: {beyond}. The log spans several steps, each of one weight version: give the checkpoint of each as --model, "
    "with its --weight-version",
    None: "staleness: {beyond}. If each step of the run has one version, the log only spans several steps: give the checkpoint "
    "of each as --model, with its --weight-version. Otherwise sync weights more often or lower the learning rate",
}
"""What several weight versions of a log mean, by whether rollouts of one step have several; None if the log does not say."""


@dataclass(frozen=True, kw_only=True)
class LoggedRoutes:
    """Experts of one response's tokens, as they are in a file; None where it does not say."""

    experts: NDArray[np.integer[Any]]  # [R, L, K], of the MoE layers or of all layers
    start: int = 0  # position of row 0 in the sequence
    layers: tuple[int, ...] | None = None  # absolute indices of the MoE layers
    num_experts: int | None = None

    def trace(self, shape: RoutingShape, tokens: tuple[int, ...], where: str) -> RoutingTrace:
        """Return the routes of these tokens as a trace for a model; `RoutingError` if they belong to another one."""
        for name, logged, needed in (
            ("MoE layers", self.layers, shape.layers),
            ("experts per layer", self.num_experts, shape.num_experts),
        ):
            if logged is not None and logged != needed:
                raise RoutingError(
                    f"{where}: its routes are of {name} {logged}, the model has {needed}; give the model that was sampled."
                )
        return RoutingTrace.ingest(
            self.experts, num_experts=shape.num_experts, layers=shape.layers, top_k=shape.top_k, tokens=tokens, version=0,
            request=where, start=self.start,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Why and how a run kept a row as evidence."""

    reason: str
    late: bool  # whether later weights scored it than those that sampled it
    pictured: bool  # whether its prompt had an image, which is not in the file
    worst: bool  # whether its gap is among the largest of its batch
    width: int  # tokens and pads of the row's prompt in the batch that was scored
    trainer: Mapping[str, Any]  # how the trainer computed


@dataclass(frozen=True, kw_only=True)
class LoggedResponse:
    """One response, from the first sampled token on."""

    where: str  # its place in the file, for messages
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[bool, ...]  # True where the policy sampled a token
    logprobs: tuple[float, ...]  # the engine's, in nats; NaN where there is none
    versions: tuple[str, ...] = ()  # of the weights that sampled it
    step: str | None = None  # of the run that trained on it; None if unknown
    trainer_logprobs: tuple[float, ...] | None = None  # the run's own trainer's, in nats; NaN where there is none
    settings: Mapping[str, Any] = field(default_factory=dict)
    routes: LoggedRoutes | None = None
    unused: tuple[str, ...] = ()  # keys of its row that are not read
    kept: Kept | None = None  # why a run kept this row; None for a log

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise RecordError(f"{self.where}: its first token counts as sampled; a prompt must have a token.")
        count = len(self.response_ids)
        for name in ("mask", "logprobs", "trainer_logprobs"):
            column = getattr(self, name)
            if column is not None and len(column) != count:
                raise RecordError(
                    f"{self.where}: {len(column)} {name} for {count} response_ids; the two must be equal."
                )
        heat = self.settings.get("temperature")
        if heat is not None and not (type(heat) in (int, float) and 0 <= heat < math.inf):
            raise RecordError(
                f"{self.where}: the sampling temperature is {heat!r}; it must be a number > 0, or 0 for the best token. "
                "Correct it or leave it out."
            )

    @property
    def version(self) -> str:
        """The version of the weights that sampled it; several versions are joined by a plus."""
        return "+".join(dict.fromkeys(self.versions)) or UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Responses of one file that have tokens sampled by the policy, and how many others were left out."""

    path: str
    host: str
    responses: tuple[LoggedResponse, ...]
    left_out: int = 0
    # Whether the trainer may have scored with later weights than those that sampled: by steps, or by versions without steps.
    scored_late: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The sampling settings in the file; `RecordError` names the first one that differs between responses."""
        first: dict[str, tuple[Any, str]] = {}
        for response in self.responses:
            for name, value in response.settings.items():
                other, where = first.setdefault(name, (value, response.where))
                if other != value:
                    raise RecordError(
                        f"{response.where} was sampled with {name}={value}, and {where} with {other}: the doctor compares one "
                        "way of sampling with the trainer; split the file."
                    )
        return {name: value for name, (value, _) in first.items()}

    @property
    def kept(self) -> Kept | None:
        """What a run says of the rows that it kept as evidence; None for any other log."""
        every = [response.kept for response in self.responses]
        return None if None in every else every[0]

    @property
    def versions(self) -> dict[str, int]:
        """The number of responses of each weight version."""
        return dict(sorted(Counter(response.version for response in self.responses).items()))

    def of_version(self, version: str) -> Logged:
        """Return the responses that one version of the weights sampled; `RecordError` if there are none."""
        chosen = tuple(response for response in self.responses if response.version == version)
        if not chosen:
            listed = ", ".join(f"{name} ({count} responses)" for name, count in self.versions.items())
            key = ". The key `weight_version` of a row holds its version" if self.host == OWN else ""
            raise RecordError(
                f"{self.path} holds no response of weight version {version}; it has {listed or 'none at all'}{key}."
            )
        return replace(self, responses=chosen, left_out=self.left_out + len(self.responses) - len(chosen))

    def of_text(self, placeholders: Collection[int]) -> Logged:
        """Return the responses to prompts of text alone; `placeholders` are the ids that stand for an image or the like."""
        chosen = tuple(
            response
            for response in self.responses
            if not (response.kept is not None and response.kept.pictured)
            and not set(placeholders).intersection(response.prompt_ids)
        )
        if not chosen:
            raise RecordError(
                f"{self.path}: every prompt has an image or the like, which the doctor does not score; give rows of text."
            )
        return replace(self, responses=chosen, left_out=self.left_out + len(self.responses) - len(chosen))

    def sample(self, shape: RoutingShape | None = None) -> Sample:
        """Return what the doctor compares, for a model with this routing shape; None for one without experts."""
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
        """Return a sentence that says what was read, for a model with or without experts."""
        versions = sorted({response.version for response in self.responses} - {UNKNOWN})
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        parts = [f"{len(self.responses)} logged responses of {self.host}"]
        parts += [f"{self.left_out} left out"] * bool(self.left_out)
        parts += [f"weight version {', '.join(versions)}"] * bool(versions)
        parts += [f"sampled with {', '.join(settings)}"] * bool(settings)
        without = experts and all(response.routes is None for response in self.responses)
        parts += ["no routes in the file: what the trainer's own routes change counts as the engine's error"] * without
        unused = sorted({key for response in self.responses for key in response.unused})
        parts += [f"keys of the rows that were not used: {', '.join(unused[:12])}"] * bool(unused)
        return "; ".join(parts)

    def trainer(self, sample: Sample) -> Floats | None:
        """Return the log's own `trainer_logprobs` `[N]`, NaN where it has none; None if all are, or copy the engine's."""
        columns = [response.trainer_logprobs or (None,) * len(response.mask) for response in self.responses]
        scored = sample.sampled(columns)
        known = np.isfinite(scored)
        return None if (scored == sample.engine)[known].all() else scored


def of_nearest(logged: Logged, sample: Sample, trainer: Floats) -> tuple[Logged, tuple[str, ...]]:
    """Return the responses of the weight version that is nearest to the trainer's, and a note for each version.

    Numerics are the gap between equal weights, and only the nearest version may have equal ones; what the others have beyond it
    is staleness. `trainer` are the trainer's log-probabilities of the log's tokens `[N]`.
    """
    difference = torch.from_numpy(trainer - sample.engine)
    version = np.array([response.version for response in logged.responses])[sample.row]
    of = {name: difference[torch.from_numpy(version == name)] for name in logged.versions}
    mean = {name: float(part.abs().mean()) for name, part in of.items() if len(part)}
    nearest, whole = min(mean, key=mean.__getitem__), float(difference.abs().mean())
    notes = [
        f"weight version {name}: {logged.versions[name]} responses, {len(of[name]):,} tokens, mean |Δlogp| {mean[name]:.1e} "
        f"nats, k3 {float(k3(of[name]).mean()):.1e}{', the one that was examined' if name == nearest else ''}"
        for name in mean
    ]
    beyond = f"{1 - mean[nearest] / whole:.0%} of the whole log's {whole:.1e} nats per token is beyond what version {nearest} has"
    return logged.of_version(nearest), (*notes, LATE[_mixed_steps(logged)].format(beyond=beyond))


def _mixed_steps(logged: Logged) -> bool | None:
    """Tell whether rollouts of one step are of several weight versions; None if the log does not say which steps they are of."""
    of_step: dict[str, set[str]] = {}
    for response in logged.responses:
        if response.step is None or not response.versions:
            return None
        of_step.setdefault(response.step, set()).update(response.versions)
    return any(len(versions) > 1 for versions in of_step.values())
