"""The check, before the first step, that every process of a run runs with the block, as a function of the processes' reports.

`processes.py` and `servers.py` ask the processes. Nothing here does, so each refusal can be tested on reports that real processes
sent (`tests/data/verl`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_ext.adapters.sglang.server import check_server
from mismatch_ext.adapters.verl.loss import needs_own_loss
from mismatch_ext.adapters.verl.refusals import FIXES

from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, EngineError, PeerVersionError
from mismatch_ext.names import PREFIX
from mismatch_ext.precision.audit import AuditReport, EngineReading, TrainerReading, audit
from mismatch_ext.rollout import EngineAnswer
from mismatch_ext.versions import PEERS

Report = Mapping[str, Any]

LOSS = "mismatch_ext.adapters.verl.loss"
"""Module of the loss that does what verl's own loss cannot."""

NEEDED = {
    "vllm": "Its workers need rollout.engine_kwargs.vllm.worker_extension_cls as this package sets it.",
    "sglang": "Its process needs the server class of this package in verl's registry.",
}


@dataclass(frozen=True, kw_only=True)
class RolloutAnswer:
    """What one of verl's rollout servers said."""

    engine: str  # "vllm" or "sglang"
    expected: int  # reports that it owes: one for each of vLLM's workers, one for an SGLang server
    reports: Sequence[Report] = ()
    failure: Exception | None = None  # what went wrong instead


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a run with the block really runs with, for its banner and the header of its metrics."""

    worker: Report  # of the first one, with which the others agree
    trainer: TrainerReading  # of that worker
    engine: EngineReading  # of the first rollout worker, with which the others agree
    audit: AuditReport | None  # None when no precision was asked for
    patches: Sequence[Mapping[str, Any]] = ()  # descriptions of those in the first rollout server's process
    readiness: Sequence[str] = ()  # warnings about weights, each once, with the first rank that has it


def check_reports(
    block: MismatchConfig,
    workers: Sequence[Report],
    rollouts: Sequence[RolloutAnswer],
    checks: Checks | None = None,
) -> Checked:
    """Check that every worker, in the order of ranks, and every rollout server runs the block, in the dtypes that it asks for.

    Returns what is active. Raises MismatchError if a process runs with something else, which the message names.
    """
    checks = Checks(True) if checks is None else checks
    trainers = [(f"worker of rank {report['rank']}", report) for report in workers]
    if not trainers:
        raise ConfigError(
            "no worker of the actor says what it runs with, so that nothing of the block is known to be active."
        )
    for number, answer in enumerate(rollouts):
        with checks.checking("rollout_servers"):
            _check_answer(number, answer)
    engines = [(f"rollout worker {i}", r) for i, r in enumerate(r for answer in rollouts for r in answer.reports)]
    if not engines:
        raise EngineError("no rollout server says what it runs with: verl has started none for this actor.")
    for name, report in trainers:
        with checks.checking("workers"):
            _check_worker(block, name, report)
    for name, report in engines:
        with checks.checking("rollout_workers"):
            _check_rollout(block, name, report)
    with checks.checking("workers"):
        _check_agreement(trainers, _WORKER)
    with checks.checking("rollout_workers"):
        _check_agreement(engines, _ROLLOUT)
    readings = [TrainerReading(**report["trainer"]) for _, report in trainers]
    for _, report in engines:
        if "server" in report:
            with checks.checking("rollout_servers"):
                verdict = check_server(
                    report["server"], config=block, trainer_dtype=readings[0].compute_dtype, sends_all_weights=True
                )
                verdict.raise_for_problems()
                for note in verdict.notes:
                    warnings.warn(note, stacklevel=2)
    found = [EngineReading(**report["reading"]) for _, report in engines]
    audited = None
    with checks.checking("precision"):
        audited = _audit(block, readings, found)
    return Checked(
        worker=trainers[0][1],
        trainer=readings[0],
        engine=found[0],
        audit=audited,
        patches=engines[0][1].get("patches", ()),
        readiness=_warnings(workers),
    )


def _warnings(workers: Sequence[Report]) -> list[str]:
    first: dict[str, int] = {}
    for report in workers:
        if (message := report.get("readiness")) is not None:
            first.setdefault(message, report["rank"])
    return [f"rank {rank}: {message}" if len(workers) > 1 else message for message, rank in first.items()]


def of_ranks(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the ranks' measurements under the names that are logged; all ranks answer the same, so the first one's are taken."""
    return {name if name.startswith(PREFIX) else PREFIX + name: value for name, value in answers[0].items()}


def under_our_names(metrics: MutableMapping[str, Any]) -> None:
    """Take verl's `actor/` off metrics that the workers' loss has given our prefix, in place."""
    for name in [name for name in metrics if name.startswith(f"actor/{PREFIX}")]:
        metrics[name.removeprefix("actor/")] = metrics.pop(name)


def engine_answers(rollouts: Iterable[tuple[int, RolloutAnswer]]) -> list[EngineAnswer]:
    """Return what rollout servers, each with its number, say of themselves after a weight update; raises EngineError."""
    found = []
    for number, answer in rollouts:
        _check_answer(number, answer)
        found += [
            EngineAnswer(
                name=f"rollout server {number}",
                reading=EngineReading(**report["reading"]),
                patch_digest=report["patch_digest"],
                weight_version=report["weight_version"],
            )
            for report in answer.reports
        ]
    return found


def _check_answer(number: int, answer: RolloutAnswer) -> None:
    if (error := answer.failure) is not None:
        raise EngineError(
            f"rollout server {number} does not say what it runs with: {type(error).__name__}: {error}. {NEEDED[answer.engine]}"
        ) from error
    if len(answer.reports) != answer.expected:
        raise EngineError(
            f"rollout server {number} has {answer.expected} workers, and {len(answer.reports)} of them say what they run with."
        )


def _check_worker(block: MismatchConfig, name: str, report: Report) -> None:
    for section, asked, found in (
        ("routing.mode", None if block.routing is None else block.routing.mode, report.get("routing")),
        ("lr", block.lr is not None, report.get("lr") is not None),
        ("sampling_mask", block.sampling_mask is not None, bool(report.get("sampling_mask"))),
    ):
        if asked != found:
            raise ConfigError(f"mismatch.{section}: {asked!r} was asked for, and the {name} runs with {found!r}.")
    if block.routing is not None and report["strategy"] == "megatron" and not report.get("patches"):
        raise ConfigError(
            f"mismatch.routing: the {name} runs verl's Megatron replay without this package's checks, whose patches are missing "
            "there: it would replay any id, and a router without routes would choose for itself."
        )
    if report["loss"] != LOSS and (key := needs_own_loss(block)) is not None:
        raise ConfigError(
            f"mismatch.{key}: it takes a loss of this package, and the {name} runs with the loss of {report['loss']}, not of "
            f"{LOSS}. Something else has called set_loss_fn on that worker."
        )


def _check_rollout(block: MismatchConfig, name: str, report: Report) -> None:
    engine, version = report["reading"]["engine"], report["reading"]["version"]
    if not PEERS[engine].accepts(version):
        raise PeerVersionError(
            f"the {name} runs {engine} {version}, which is outside the supported range {PEERS[engine].supports}. Install a "
            "version in that range where that process runs."
        )
    if block.routing is not None and block.routing.mode == "R3" and not report["records_routing"]:
        raise EngineError(
            f"mismatch.routing.mode='R3', but the {name} does not record routing: {engine} {version} was started without "
            "enable_return_routed_experts. Look for rollout.engine_kwargs that switch it off."
        )
    if block.sampling_mask is not None and not report.get("sends_masks"):
        raise EngineError(
            f"mismatch.sampling_mask, but the {name} is of a server that sends no sampling masks: it is not this package's. "
            "Something else has put a server into verl's registry; remove it."
        )


# What all processes of a kind must report alike. Parameter counts by dtype are not in it, because they depend on a rank's shards.
_WORKER = (
    *("versions", "engine", "strategy", "loss", "lr", "patches"),
    *("trainer.autocast_dtype", "trainer.scaler", "trainer.reduce_dtype"),
)
_ROLLOUT = (
    *("records_routing", "reading.engine", "reading.version", "reading.model_dtype", "reading.kv_cache_dtype"),
    *("reading.logprobs_mode", "reading.quantization"),
)


def _check_agreement(named: Sequence[tuple[str, Report]], paths: Sequence[str]) -> None:
    """Refuse processes of a kind that differ: what is said of the first would not hold for the others."""
    first, given = named[0]
    for name, report in named[1:]:
        for path in paths:
            one, other = _at(given, path), _at(report, path)
            if one != other:
                raise ConfigError(
                    f"the {name} runs with {path}={other!r}, the {first} with {one!r}: all have to agree. Install and "
                    "configure the same on every node."
                )


def _at(report: Report, path: str) -> Any:
    section, _, name = path.rpartition(".")
    return (report[section] if section else report).get(name)


def _audit(
    block: MismatchConfig, trainers: Sequence[TrainerReading], engines: Sequence[EngineReading]
) -> AuditReport | None:
    if block.precision is None:
        return None
    reports = [audit(block.precision, trainer, engine, None, FIXES) for trainer in trainers for engine in engines]
    for report in reports:
        report.raise_for_findings()
    return reports[0]
