"""What becomes of rollouts of other weights under each host, by the adapter's own methods, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.rollout import Origins, SamplingSettings, to_provenance, to_records
from tests.peers.conformance.origins import NAMES, PRESENT, ROLLOUTS
from tests.peers.verl.in_process.routes import refused
from tests.peers.verl.recorded import recorded


def _reading() -> EngineReading:
    return EngineReading(**recorded("dense")["rollouts"][0]["reports"][0]["reading"])


def trl() -> dict[str, str]:
    """Hand records to TRL's trainer, of which no more than this method runs."""
    import torch
    from mismatch_ext.adapters.trl.passes import RolloutPass
    from mismatch_ext.adapters.trl.run import TrlRun

    from mismatch_ext.bad_rows import BadRows

    found = {}
    for case, versions in ROLLOUTS.items():
        bad: dict[int, Any] = {}

        def check(versions: tuple[int | None, ...] = versions, bad: dict[int, Any] = bad) -> None:
            records = []
            for name, version in zip(NAMES, versions, strict=True):
                origin: Any = version
                if version is not None:
                    origin = to_provenance(_reading(), sampling=SamplingSettings(), weight_version=version)
                row = to_records([[5, 6]], [[7, 8]], [[-0.5, -1.0]], provenance=origin, names=[name])
                records += row
            run: Any = object.__new__(TrlRun)
            run.checked = SimpleNamespace(weight_version=PRESENT)
            rows = {
                "prompt_ids": torch.tensor([[5, 6]] * len(records)),
                "completion_ids": torch.tensor([[7, 8]] * len(records)),
                **{f"{part}_mask": torch.ones(len(records), 2, dtype=torch.long) for part in ("prompt", "completion")},
            }
            judged = BadRows(len(records))
            run.check_records(rows, RolloutPass(records=records), judged)
            bad.update(judged.faults)

        found[case] = refused(check)
        if bad:
            # One row's fault ends nothing.
            found[case] = " ".join(f"{fault.reason}: {fault.message}" for fault in bad.values())
    return found


def verl() -> dict[str, str]:
    """Hand the tags of a batch to what verl's trainer checks them with, after its servers have answered."""
    from mismatch_ext.adapters.verl.driver.batch_checks import versions as tags_of
    from mismatch_ext.adapters.verl.driver.reports import RolloutAnswer, engine_answers

    origins = Origins(SamplingSettings())
    report = recorded("dense")["rollouts"][0]["reports"][0]

    def answers(**changes: Any) -> list[RolloutAnswer]:
        reports = [report | {"weight_version": PRESENT}, report | {"weight_version": PRESENT} | changes]
        return [RolloutAnswer(engine="vllm", expected=1, reports=[each]) for each in reports]

    def send(version: int, answers: list[RolloutAnswer]) -> None:
        origins.sent(version, engine_answers(enumerate(answers)))

    def check(batch: Any) -> None:
        origins.check(tags_of(batch))

    found = {"unasked": refused(check, batch(ROLLOUTS["present"]))}
    send(PRESENT, answers())
    for case, versions in ROLLOUTS.items():
        found[case] = refused(check, batch(versions))
    found["two versions"] = refused(check, batch(ROLLOUTS["present"], last=PRESENT + 1))
    other = report["reading"] | {"version": "0.29.0"}
    for name, sent, changes in (
        ("server is stale", PRESENT, {"weight_version": PRESENT - 1}),
        ("server got none", PRESENT, {"weight_version": None}),
        ("server is patched", PRESENT, {"patch_digest": "ab"}),
        ("server is another", PRESENT, {"reading": other}),
        ("no server has it", PRESENT + 1, {}),
    ):
        found[name] = refused(send, sent, answers(**changes))
    both = [
        RolloutAnswer(engine="vllm", expected=1, reports=[each.reports[0] | {"reading": other}]) for each in answers()
    ]
    found["servers have changed"] = refused(send, PRESENT, both)
    return found


def batch(versions: tuple[int | None, ...], last: int | None = None) -> Any:
    """Return verl's keys and tags of a batch that it has filled up in front."""
    tags: list[dict[str, Any]] = [{"is_padding": True, "min_global_steps": 0, "max_global_steps": 0}]
    tags += [{"min_global_steps": v, "max_global_steps": v if last is None else last} for v in versions]
    return SimpleNamespace(keys=["filler", *NAMES], tags=tags)
