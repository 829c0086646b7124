"""Expands a line or a file of a rollout log into flat rows, where a table of keys alone does not say what a row is.

Each function takes the object of a line, or of a `torch.save` file, and its place for messages. It yields rows, each with its
place. A row has the keys that the format's entry in `log_formats.py` names.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mismatch_ext.doctor.logged import FILE, Kept, LoggedRoutes
from mismatch_ext.errors import RecordError
from mismatch_ext.rollout import Provenance
from mismatch_ext.routing import RoutingTrace

Rows = Iterator[tuple[str, Mapping[str, Any]]]
"""Rows, each with its place in the file."""
WRITTEN = {key.name for key in fields(Provenance)}
# Little-endian, so that a file is the same on every machine.
DTYPES = {"uint8": "<u1", "uint16": "<u2"}

Id = Annotated[int, Field(ge=0)]
Ids = list[Id]
Flags = list[Annotated[bool, Field(strict=False)]]
# null where the policy did not sample.
Logprobs = list[Annotated[float, BeforeValidator(lambda value: float("nan") if value is None else value)]]
Setting = int | float | str | bool | None
NullIsEmpty = BeforeValidator(lambda value: value or [])
OtherIsEmpty = BeforeValidator(lambda value: value if isinstance(value, dict) else {})


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)


Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], values: Mapping[str, Any], where: str, keys: Mapping[str, str] | None = None) -> Model:
    """Return the values as a model; `RecordError` names the first that is missing or malformed.

    `keys` are the names that the file has for the model's fields.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        first, *rest = map(str, problem["loc"])
        place = ".".join([(keys or {}).get(first, first), *rest])
        raise RecordError(f"{where}: {place}: {problem['msg']}, found {short(problem['input'])}.") from error


def short(value: object) -> str:
    """Return a value as the start of one line of text."""
    return " ".join(str(value).split())[:200]


def one_row(line: Mapping[str, Any], where: str) -> Rows:
    """Yield a line that is a row already."""
    yield where, line


class _Provenance(Strict):
    weight_version: int | str | None = None
    sampling: dict[str, Setting] = {}
    engine: Setting = None
    engine_version: Setting = None
    dtype: Setting = None
    kv_cache_dtype: Setting = None
    logprobs_mode: Setting = None


class _Routes(Strict):
    start: int
    layers: list[int]
    num_experts: int
    shape: list[int]
    dtype: str
    experts: str  # base64


class _Kept(Strict):
    """What a run says of a row that it kept as evidence (`mismatch_ext.evidence`)."""

    row: int
    chosen: str
    reason: str
    sampled_after: int | None = None
    pictured: bool = False
    left_pads: int = 0
    right_pads: int = 0
    trainer: dict[str, Setting] = {}


class _OwnLine(Strict):
    weight_version: int | str | None = None
    step: int | None = None
    provenance: _Provenance | None = None
    routes: _Routes | None = None
    kept: _Kept | None = None


def own_rows(line: Mapping[str, Any], where: str) -> Rows:
    """Yield a line of our own, with the version and the settings that its `provenance` holds, and its routes as an array."""
    stated = checked(_OwnLine, line, where)
    settings = {} if stated.provenance is None else stated.provenance.model_dump(exclude_none=True)
    version = settings.pop("weight_version", stated.weight_version)
    settings |= settings.pop("sampling", {})
    if stated.weight_version is not None and str(version) != str(stated.weight_version):
        raise RecordError(
            f"{where}: weight_version is {stated.weight_version}, and provenance.weight_version {version}; give one of the two."
        )
    if version is None:
        # Weights change from step to step, and rows of several steps must not count as one version.
        version = stated.step
    routes = None if stated.routes is None else _unpacked(stated.routes, where)
    unknown = {f"provenance.{key}": True for key in line.get("provenance") or () if key not in WRITTEN}
    row = {**line, "weight_version": version, "provenance": settings, "routes": routes, **unknown}
    if stated.kept is not None:
        row["kept"] = _kept(stated.kept, line, stated.step)
    yield where, row


def _kept(kept: _Kept, line: Mapping[str, Any], step: int | None) -> Kept:
    return Kept(
        reason=kept.reason,
        late=kept.sampled_after not in (None, step),
        pictured=kept.pictured,
        worst=kept.chosen == "worst",
        width=kept.left_pads + len(line.get("prompt_ids") or ()),
        trainer=kept.trainer,
    )


def line_of_routes(trace: RoutingTrace) -> dict[str, Any]:
    """Return the routes of a response as a line of our own holds them."""
    experts = trace.experts.cpu().numpy()
    kind = experts.dtype.name
    packed = base64.b64encode(experts.astype(DTYPES[kind]).tobytes())
    return {
        "start": trace.start,
        "layers": list(trace.layers),
        "num_experts": trace.num_experts,
        "shape": list(experts.shape),
        "dtype": kind,
        "experts": packed.decode("ascii"),
    }


def _unpacked(routes: _Routes, where: str) -> LoggedRoutes:
    try:
        ids = base64.b64decode(routes.experts, validate=True)
        experts = np.frombuffer(ids, dtype=DTYPES[routes.dtype]).reshape(routes.shape)
    except (KeyError, ValueError) as error:
        raise RecordError(f"{where}: routes cannot be read: {type(error).__name__} {error}.") from error
    return LoggedRoutes(
        experts=experts, start=routes.start, layers=tuple(routes.layers), num_experts=routes.num_experts
    )


class _SlimeFile(Strict):
    samples: list[dict[str, Any]]


def slime_rows(content: Mapping[str, Any], where: str) -> Rows:
    """Yield the samples of a file."""
    for number, sample in enumerate(checked(_SlimeFile, content, where).samples):
        yield f"{where}, sample {number}", {**sample, "step": FILE}


class _Policy(Strict):
    start: Any = None
    end: Any = None


class _Work(Strict):
    policy: Annotated[_Policy, OtherIsEmpty] = _Policy()


class _Run(Strict):
    work: Annotated[_Work, OtherIsEmpty] = _Work()


class _Agent(Strict):
    trainable: Any = True


class _Call(Strict):
    node: Any = None
    sampling: Annotated[dict[str, Any], OtherIsEmpty] = {}


class _Node(Strict):
    parent: Id | None = None
    # If no renderer tokenized a node, its empty lists are not in the file.
    token_ids: Annotated[Ids, NullIsEmpty] = []
    mask: Annotated[Flags, NullIsEmpty] = []
    logprobs: Annotated[Logprobs, NullIsEmpty] = []  # of the sampled tokens alone


class _Trace(Strict):
    nodes: list[_Node]
    agent: Annotated[_Agent, OtherIsEmpty] = _Agent()
    calls: Annotated[list[Annotated[_Call, OtherIsEmpty]], NullIsEmpty] = []


class _Episode(Strict):
    traces: list[_Trace]
    run: Annotated[_Run, OtherIsEmpty] = _Run()


def prime_rl_rows(line: Mapping[str, Any], where: str) -> Rows:
    """Yield a row for each path from a root to a leaf of an episode's traces, which are graphs of messages."""
    episode = checked(_Episode, line, where)
    policy = episode.run.work.policy
    versions = [str(version) for version in (policy.start, policy.end) if version is not None]
    for number, trace in enumerate(episode.traces):
        place = f"{where}, trace {number}"
        # The tokens of a judge come from another model.
        rows = list(_sequences(trace, place)) if trace.agent.trainable else []
        for row in rows or [{"tokens": [], "mask": [], "logprobs": []}]:
            yield place, {**row, "versions": versions, "step": FILE}


def _sequences(trace: _Trace, where: str) -> Iterator[dict[str, Any]]:
    """Yield the tokens of each path with sampled ones; a node that paths share is sampled only in the first of them."""
    seen: set[int] = set()
    for path in _paths(trace.nodes, where):
        tokens: list[int] = []
        mask: list[bool] = []
        logprobs: list[float | None] = []
        for number in path:
            node = trace.nodes[number]
            sampled = iter(node.logprobs)
            tokens += node.token_ids
            mask += [False] * len(node.mask) if number in seen else node.mask
            logprobs += [next(sampled) if flag else None for flag in node.mask]
        seen.update(path)
        if any(mask):
            yield {"tokens": tokens, "mask": mask, "logprobs": logprobs, "sampling": _sampling(trace, path)}


def _paths(nodes: list[_Node], where: str) -> list[list[int]]:
    """Return the numbers of the nodes from a root to each leaf."""
    paths: list[list[int]] = []
    for number, node in enumerate(nodes):
        place = f"{where}, node {number}"
        if node.parent is not None and node.parent >= number:
            raise RecordError(f"{place}: parent {node.parent} must be the number of a node before it.")
        if len(node.mask) != len(node.token_ids) or len(node.logprobs) != sum(node.mask):
            raise RecordError(
                f"{place}: {len(node.token_ids)} token_ids, {len(node.mask)} values of mask and {len(node.logprobs)} logprobs; "
                "each token must have a mask and each sampled one a log-probability. Is it of a client that gives none?"
            )
        before = [] if node.parent is None else paths[node.parent]
        paths.append([*before, number])
    parents = {node.parent for node in nodes}
    return [path for path in paths if path[-1] not in parents]


def _sampling(trace: _Trace, path: list[int]) -> dict[str, Any]:
    """Return the settings of the first model call on a path."""
    for call in trace.calls:
        if call.node in path:
            return {
                name: call.sampling[name] for name in ("temperature", "top_p") if call.sampling.get(name) is not None
            }
    return {}
