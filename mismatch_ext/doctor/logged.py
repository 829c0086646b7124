"""Rollout files that hosts have logged, for `mismatch-ext doctor --rollouts`, recognized by their content.

- Our own format, which any loop can write: one line of JSON per response, with prompt_ids, response_ids, rollout_logprobs and,
  unless the policy sampled every token, response_mask. A line may also have weight_version, step, and trainer_logprobs.
  `provenance` holds those fields of `Provenance` that are known, `routes` the engine's experts in base64.
- slime's `--save-debug-rollout-data PATH` (and `--dump-details`): a file of `torch.save` per rollout, by
  `slime/observability/rollout_data_utils.py` (THUDM/slime, commit 624b824a898ab0ec1fcb4d373004c7f3852bf515). `tokens` covers
  prompt and response; `loss_mask` and `rollout_log_probs` cover only the response. `rollout_routed_experts` has, for each token
  but the last, a row `[layers, K]` over all decoder layers.
- NeMo-RL's `train_data_step*.jsonl`: a line per sequence, padded on the right, by `nemo_rl/algorithms/grpo.py` (NVIDIA-NeMo/RL,
  commit 7ea279abfbeb698b092856d0dab61e7cf39bc909). A line is a batch of one, so every field is a list with one entry.
- prime-rl's `rollouts/step_N/train/*/traces.jsonl`: a line per episode, by `src/prime_rl/monitors/file.py`
  (PrimeIntellect-ai/prime-rl, commit 559b44772e471d1538537b8805cc77f3824a5e64). Traces are graphs of messages; each path from a
  root to a leaf is one sequence. A message that several paths share is trained on only in the first of them. `policy` holds the
  versions of the weights at the episode's start and end. Routes are not written.

Shapes: R rows (tokens with a recorded route), L layers, K experts per token.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import gzip
import json
import math
import pickle
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mismatch_ext.doctor.sample import Floats, Sample
from mismatch_ext.errors import RecordError, RoutingError, RunDirectoryError
from mismatch_ext.files import write_whole
from mismatch_ext.gap import k3
from mismatch_ext.rollout import Provenance, RolloutRecord
from mismatch_ext.routing import RoutingShape, RoutingTrace

UNKNOWN = "unknown"
OWN, SLIME, NEMO_RL, PRIME_RL = "mismatch-ext's own format", "slime", "NeMo-RL", "prime-rl"
READABLE = f"{OWN}, slime's --save-debug-rollout-data, prime-rl's traces.jsonl and NeMo-RL's train_data_step*.jsonl"
OURS = (
    "A line of our own has the keys prompt_ids, response_ids and rollout_logprobs (token ids and nats, one per response token): "
    'rename yours, or see "Logged rollouts" in docs/doctor.md'
)
WRITE = "write records with mismatch_ext.doctor.write_rollouts"
TEXTS = f"which holds texts alone; the doctor needs token ids and the engine's log-probabilities: {WRITE}"
LATE = {
    True: "staleness: {beyond}. Sync weights more often or lower the learning rate; no setting of the engine changes it",
    False: "steps: {beyond}. The log spans several steps, each of one weight version: give the checkpoint of each as --model, "
    "with its --weight-version",
    None: "staleness: {beyond}. If each step of the run has one version, the log only spans several steps: give the checkpoint "
    "of each as --model, with its --weight-version. Otherwise sync weights more often or lower the learning rate",
}
"""What several weight versions of a log mean, by whether rollouts of one step have several; None if the log does not say."""
ZIP, PARQUET, GZIP = b"PK\x03\x04", b"PAR1", b"\x1f\x8b"
# Keys by which a line is recognized. Of verl's files no tokenizer recovers the ids: texts are decoded without special tokens.
KEYS = {
    OWN: {"prompt_ids", "response_ids"},
    NEMO_RL: {"token_loss_mask", "input_lengths", "idx"},
    PRIME_RL: {"env", "task", "traces"},
    "verl's trainer.rollout_data_dir or validation_data_dir": {"input", "output", "score", "step"},
}
FILE = "the file's"
"""The step of hosts that write a file for each."""
WRITTEN = {key.name for key in fields(Provenance)}
# Little-endian, so that a file is the same on every machine.
DTYPES = {"uint8": "<u1", "uint16": "<u2"}
# Rewards are often numpy numbers; unpickling these cannot run code from the file.
NUMBERS: list[Any] = [np.float64(0).__reduce__()[0], np.dtype, codecs.encode]
NUMBERS += [type(np.dtype(kind)) for kind in ("bool", "int32", "int64", "float32", "float64")]

Id = Annotated[int, Field(ge=0)]
Ids = list[Id]
Flags = list[Annotated[bool, Field(strict=False)]]
# null where the policy did not sample.
Logprobs = list[Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]]
Empty = BeforeValidator(lambda value: value or [])
Table = Annotated[dict[str, Any], BeforeValidator(lambda value: value if isinstance(value, dict) else {})]
T = TypeVar("T")
Single = Annotated[list[T], Field(min_length=1, max_length=1)]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True)


Setting = int | float | str | bool | None


class _Provenance(_Row):
    """What our own format says of the engine."""

    weight_version: int | str | None = None
    sampling: dict[str, Setting] = {}
    engine: Setting = None
    engine_version: Setting = None
    dtype: Setting = None
    kv_cache_dtype: Setting = None
    logprobs_mode: Setting = None


class _Routes(_Row):
    start: int
    layers: list[int]
    num_experts: int
    shape: list[int]
    dtype: str
    experts: str


class _Kept(_Row):
    """What a run says of a row that it kept as evidence (`mismatch_ext.evidence`)."""

    row: int
    chosen: str
    reason: str
    sampled_after: int | None = None
    pictured: bool = False
    left_pads: int = 0
    right_pads: int = 0
    trainer: dict[str, Setting] = {}


class _Own(_Row):
    prompt_ids: Annotated[Ids, Field(min_length=1)]
    response_ids: Annotated[Ids, Field(min_length=1)]
    rollout_logprobs: Logprobs
    response_mask: Flags | None = None
    weight_version: int | str | None = None
    step: int | None = None
    trainer_logprobs: Logprobs | None = None
    provenance: _Provenance | None = None
    routes: _Routes | None = None
    kept: _Kept | None = None


class _Slime(_Row):
    tokens: Ids
    response_length: Id
    rollout_log_probs: Logprobs | None = None
    loss_mask: Flags | None = None
    weight_versions: list[Any] | None = None
    rollout_routed_experts: Any = None


class _NemoRl(_Row):
    token_ids: Single[Ids]
    token_loss_mask: Single[Flags]
    generation_logprobs: Single[Logprobs]
    input_lengths: Single[Id]
    prev_logprobs: Single[Logprobs] | None = None


class _Node(_Row):
    parent: Id | None = None
    # If no renderer tokenized a node, its empty lists are not in the file.
    token_ids: Annotated[Ids, Empty] = []
    mask: Annotated[Flags, Empty] = []
    logprobs: Annotated[Logprobs, Empty] = []


class _Trace(_Row):
    nodes: list[_Node]
    agent: Table = {}
    calls: Annotated[list[Table], Empty] = []


class _Episode(_Row):
    traces: list[_Trace]
    run: Table = {}


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
        rows = zip(self.responses, sample.masks, strict=True)
        scored = np.array([
            value
            for response, mask in rows
            for value, sampled in zip(response.trainer_logprobs or (math.nan,) * len(mask), mask, strict=True)
            if sampled
        ])  # fmt: skip
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


def _ensure_temperature(row: LoggedResponse) -> None:
    heat = row.settings.get("temperature")
    if heat is not None and not (type(heat) in (int, float) and 0 <= heat < math.inf):
        raise RecordError(
            f"{row.where}: the sampling temperature is {heat!r}; it must be a number > 0, or 0 for the best token. "
            "Correct it or leave it out."
        )


def _scored_late(rows: Sequence[LoggedResponse]) -> bool:
    if rows and all(row.kept is not None for row in rows):
        return any(row.kept.late for row in rows if row.kept is not None)
    versions = {version for row in rows for version in row.versions}
    return any(len(versions) > 1 if row.step is None else row.step != row.version for row in rows)


def read_rollouts(path: Path, version: str | None = None) -> Logged:
    """Read a file of logged rollouts, or those of one version; raises RecordError, or RunDirectoryError if it cannot be read."""
    try:
        data = path.read_bytes()
        if data.startswith(GZIP):
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(f"{path} is a damaged gzip file: {error}. Copy it again, or take another.") from error
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror or error}.") from error
    if data.startswith(PARQUET):
        raise RecordError(f"{path} is parquet, as TRL's log_completions writes it, {TEXTS}.")
    host, rows = (SLIME, _slime_file(path)) if data.startswith(ZIP) else _text_file(path, data)
    sampled = tuple(row for row in rows if row is not None)
    for row in sampled:
        _ensure_temperature(row)
    logged = Logged(
        path=str(path),
        host=host,
        responses=sampled,
        left_out=len(rows) - len(sampled),
        scored_late=_scored_late(sampled),
    )
    return logged if version is None else logged.of_version(version)


def write_rollouts(records: Iterable[RolloutRecord], path: Path, *, routes: bool = True) -> None:
    """Write records as JSON lines, for `mismatch-ext doctor --rollouts`.

    Args:
        records: The rollouts.
        path: The file.
        routes: Whether to write the experts of each token, if they were recorded. They take a byte or two for each token, layer
            and expert, plus a third for base64.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    lines = [json.dumps(_line_of(record, routes), allow_nan=False) for record in records]
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())


def _line_of(record: RolloutRecord, routes: bool) -> dict[str, Any]:
    line = {
        "prompt_ids": list(map(int, record.prompt_ids)),
        "response_ids": list(map(int, record.response_ids)),
        # A token that a tool inserted may have none.
        "rollout_logprobs": [float(value) if math.isfinite(value) else None for value in record.rollout_logprobs],
        "response_mask": list(map(bool, record.response_mask)),
        "provenance": asdict(record.provenance),
    }
    if routes and record.routing is not None:
        line["routes"] = line_of_routes(record.routing)
    return line


def line_of_routes(trace: RoutingTrace) -> dict[str, Any]:
    """Return the routes of a response as a line holds them."""
    experts = trace.experts.cpu().numpy()
    return {
        "start": trace.start,
        "layers": list(trace.layers),
        "num_experts": trace.num_experts,
        "shape": list(experts.shape),
        "dtype": experts.dtype.name,
        "experts": base64.b64encode(experts.astype(DTYPES[experts.dtype.name]).tobytes()).decode("ascii"),
    }


def _text_file(path: Path, data: bytes) -> tuple[str, list[LoggedResponse | None]]:
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{path} is neither text nor a file of torch.save, first bytes {data[:4].hex(' ')}; read are {READABLE}."
        ) from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise RecordError(f"{path} is empty.")
    rows: list[LoggedResponse | None] = []
    host = OWN
    for number, line in numbered:
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"{where} is no JSON: {_short(error)}.") from error
        if not isinstance(row, dict):
            raise RecordError(f"{where} is a {type(row).__name__}; it must be an object.")
        host = next((name for name, keys in KEYS.items() if row.keys() >= keys), "")
        if not host:
            keys = ", ".join(sorted(row)[:12]) or "nothing"
            raise RecordError(
                f"{where} holds {keys}, which no format that is known here has; read are {READABLE}. {OURS}."
            )
        if host not in LINES:
            raise RecordError(f"{where} is of {host}, {TEXTS}.")
        rows += LINES[host](row, where)
    return host, rows


Model = TypeVar("Model", bound=BaseModel)


def _checked(model: type[Model], row: Mapping[str, Any], where: str, needs: str = "") -> Model:
    """Return a row's fields; `RecordError` names the fields that are missing, or the first that is malformed."""
    try:
        return model.model_validate(row)
    except ValidationError as error:
        wrong = [(".".join(map(str, e["loc"])), e["type"], e["msg"], e["input"]) for e in error.errors()]
        missing = [field for field, kind, _, value in wrong if kind == "missing" or (value is None and field in row)]
        if missing:
            raise RecordError(f"{where} has no {', '.join(missing)}{needs}.") from error
        field, _, message, value = wrong[0]
        raise RecordError(f"{where}: {field}: {message}, found {_short(value)}.") from error


def _short(value: object) -> str:
    return " ".join(str(value).split())[:200]


def _own_line(row: Mapping[str, Any], where: str) -> list[LoggedResponse | None]:
    line = _checked(_Own, row, where, "; a line holds prompt_ids, response_ids and rollout_logprobs")
    settings = {} if line.provenance is None else line.provenance.model_dump(exclude_none=True)
    version = settings.pop("weight_version", line.weight_version)
    # Weights change from step to step, and rows of several steps must not count as one version.
    version = line.step if version is None else version
    if line.weight_version is not None and str(version) != str(line.weight_version):
        raise RecordError(
            f"{where}: weight_version is {line.weight_version}, and provenance.weight_version {version}; give one of the two."
        )
    if line.trainer_logprobs is not None and len(line.trainer_logprobs) != len(line.response_ids):
        raise RecordError(
            f"{where}: {len(line.trainer_logprobs)} trainer_logprobs for {len(line.response_ids)} response_ids; the two must be "
            "equal."
        )
    settings |= settings.pop("sampling", {})
    unused = [key for key in row if key not in _Own.model_fields]
    unused += [f"provenance.{key}" for key in row.get("provenance") or () if key not in WRITTEN]
    return [
        LoggedResponse(
            where=where,
            prompt_ids=tuple(line.prompt_ids),
            response_ids=tuple(line.response_ids),
            mask=tuple(line.response_mask or (True,) * len(line.response_ids)),
            logprobs=tuple(line.rollout_logprobs),
            versions=() if version is None else (str(version),),
            step=None if line.step is None else str(line.step),
            trainer_logprobs=None if line.trainer_logprobs is None else tuple(line.trainer_logprobs),
            settings=settings,
            unused=tuple(unused),
            routes=None if line.routes is None else _own_routes(line.routes, where),
            kept=None if line.kept is None else _own_kept(line),
        )
    ]


def _own_kept(line: _Own) -> Kept:
    assert line.kept is not None
    return Kept(
        reason=line.kept.reason,
        late=line.kept.sampled_after not in (None, line.step),
        pictured=line.kept.pictured,
        worst=line.kept.chosen == "worst",
        width=line.kept.left_pads + len(line.prompt_ids),
        trainer=line.kept.trainer,
    )


def _own_routes(routes: _Routes, where: str) -> LoggedRoutes:
    try:
        ids = base64.b64decode(routes.experts, validate=True)
        experts = np.frombuffer(ids, dtype=DTYPES[routes.dtype]).reshape(routes.shape)
    except (KeyError, ValueError, binascii.Error) as error:
        raise RecordError(f"{where}: routes cannot be read: {type(error).__name__} {error}.") from error
    return LoggedRoutes(
        experts=experts, start=routes.start, layers=tuple(routes.layers), num_experts=routes.num_experts
    )


def _nemo_rl_line(row: Mapping[str, Any], where: str) -> list[LoggedResponse | None]:
    fields = _checked(_NemoRl, row, where, "; NeMo-RL's GRPO logs them, its distillation has none")
    end = fields.input_lengths[0]
    mask, logprobs = fields.token_loss_mask[0][:end], fields.generation_logprobs[0][:end]
    sequence = _split(fields.token_ids[0][:end], mask, logprobs, where)
    if sequence is None:
        return [None]
    scored = None if fields.prev_logprobs is None else tuple(fields.prev_logprobs[0][:end])
    if scored is not None and len(scored) != end:
        raise RecordError(f"{where}: {len(scored)} prev_logprobs for {end} tokens; the two must be equal.")
    # With force_on_policy_ratio NeMo-RL scores nothing, and writes zeros.
    if scored is not None and any(scored):
        sequence["trainer_logprobs"] = scored[-len(sequence["response_ids"]) :]
    return [LoggedResponse(**sequence)]


def _prime_rl_line(row: Mapping[str, Any], where: str) -> list[LoggedResponse | None]:
    episode = _checked(_Episode, row, where)
    policy = episode.run.get("work", {}).get("policy", {})
    versions = tuple(str(policy[key]) for key in ("start", "end") if key in policy)
    responses: list[LoggedResponse | None] = []
    for number, trace in enumerate(episode.traces):
        # The tokens of a judge come from another model.
        trained = trace.agent.get("trainable", True)
        sequences = list(_sequences(trace, f"{where}, trace {number}")) if trained else []
        responses += [replace(sequence, versions=versions, step=FILE) for sequence in sequences] or [None]
    return responses


def _sequences(trace: _Trace, where: str) -> Iterator[LoggedResponse]:
    """Yield a sequence for each path from a root to a leaf."""
    nodes = trace.nodes
    for number, node in enumerate(nodes):
        place = f"{where}, node {number}"
        if node.parent is not None and node.parent >= number:
            raise RecordError(f"{place}: parent {node.parent} must be the number of a node before it.")
        if len(node.mask) != len(node.token_ids):
            raise RecordError(
                f"{place}: {len(node.token_ids)} token_ids and {len(node.mask)} values of mask; the two must be equal."
            )
        if len(node.logprobs) != sum(node.mask):
            raise RecordError(
                f"{place}: {len(node.logprobs)} logprobs for {sum(node.mask)} sampled tokens; the two must be equal: is it of a "
                "client that gives none?"
            )
    trained: set[int] = set()
    for leaf in range(len(nodes)):
        if any(node.parent == leaf for node in nodes):
            continue
        path, at = [leaf], nodes[leaf].parent
        while at is not None:
            path.append(at)
            at = nodes[at].parent
        path.reverse()
        tokens, mask, logprobs = [], [], []
        for at in path:
            values = iter(nodes[at].logprobs)
            tokens += nodes[at].token_ids
            mask += [sampled and at not in trained for sampled in nodes[at].mask]
            logprobs += [next(values) if sampled else 0.0 for sampled in nodes[at].mask]
        trained |= {at for at in path if any(nodes[at].mask)}
        sequence = _split(tokens, mask, logprobs, where)
        if sequence is not None:
            # The settings of the first model call on the path.
            sampling = next((call.get("sampling") or {} for call in trace.calls if call.get("node") in path), {})
            settings = {name: sampling[name] for name in ("temperature", "top_p") if sampling.get(name) is not None}
            yield LoggedResponse(**sequence, settings=settings)


def _split(tokens: list[int], mask: list[bool], logprobs: list[float], where: str) -> dict[str, Any] | None:
    """Split a sequence before its first sampled token, as fields of a `LoggedResponse`; None if no token was sampled."""
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
    values = [value if sampled else math.nan for value, sampled in zip(logprobs, mask, strict=True)]
    return {
        "where": where,
        "prompt_ids": tuple(tokens[:first]),
        "response_ids": tuple(tokens[first:]),
        "mask": tuple(mask[first:]),
        "logprobs": tuple(values[first:]),
    }


def _slime_file(path: Path) -> list[LoggedResponse | None]:
    """Read a file of slime's; objects in it that could run code are not unpickled."""
    try:
        with torch.serialization.safe_globals(NUMBERS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RecordError(
            f"{path} holds objects that are not unpickled, since a file could run code by them: {_short(error)}; leave them out "
            f"of slime's Sample.metadata, or {WRITE}."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise RecordError(f"{path} is a damaged file of torch.save: {_short(error)}") from error
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise RecordError(
            f"{path} is a file of torch.save, and not as slime's --save-debug-rollout-data writes it, with a list of `samples`."
        )
    return [_slime_sample(sample, f"{path}, sample {number}") for number, sample in enumerate(samples)]


def _slime_sample(sample: Mapping[str, Any], where: str) -> LoggedResponse | None:
    fields = _checked(_Slime, sample, where, "; is it one of slime's?")
    ids, length = tuple(fields.tokens), fields.response_length
    mask = (True,) * length if fields.loss_mask is None else tuple(fields.loss_mask)
    if not any(mask):
        return None
    if fields.rollout_log_probs is None:
        raise RecordError(
            f"{where} has no rollout_log_probs; slime logs them unless a generate function of your own leaves them out."
        )
    if length >= len(ids):
        raise RecordError(
            f"{where}: response_length {length} is not between 1 and its {len(ids)} tokens, less a prompt."
        )
    return LoggedResponse(
        where=where,
        prompt_ids=ids[:-length],
        response_ids=ids[-length:],
        mask=mask,
        logprobs=tuple(fields.rollout_log_probs),
        versions=tuple(map(str, fields.weight_versions or ())),
        step=FILE,
        routes=None if fields.rollout_routed_experts is None else _slime_routes(fields.rollout_routed_experts, where),
    )


def _slime_routes(routed: Any, where: str) -> LoggedRoutes:
    try:
        experts = torch.as_tensor(routed)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{where}: rollout_routed_experts cannot be read: {error}") from error
    if experts.dim() != 3 or experts.is_floating_point():
        raise RecordError(
            f"{where}: rollout_routed_experts is {experts.dtype} {tuple(experts.shape)}; it must be integers [tokens, layers, "
            "experts]."
        )
    return LoggedRoutes(experts=experts.numpy())


LINES = {OWN: _own_line, NEMO_RL: _nemo_rl_line, PRIME_RL: _prime_rl_line}
