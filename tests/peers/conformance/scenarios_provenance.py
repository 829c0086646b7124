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
    report = recorded("dense")["rollouts"][0]["reports"][0] | {"weight_version": PRESENT}
    answers = [RolloutAnswer(engine="vllm", expected=1, reports=[report])] * 2
    origins.sent(PRESENT, engine_answers(enumerate(answers)))
    return {
        case: refused(lambda asked: origins.check(tags_of(batch(asked))), versions)
        for case, versions in ROLLOUTS.items()
    }


def batch(versions: tuple[int | None, ...]) -> Any:
    """Return verl's keys and tags of a batch that it has filled up in front."""
    tags: list[dict[str, Any]] = [{"is_padding": True, "min_global_steps": 0, "max_global_steps": 0}]
    tags += [{"min_global_steps": v, "max_global_steps": v} for v in versions]
    return SimpleNamespace(keys=["filler", *NAMES], tags=tags)
