"""Before the first step: every refusal of what workers and rollout servers report, on reports that real processes sent."""

from __future__ import annotations

import copy
import functools
import json
import operator
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from mismatch_ext.adapters.verl import plugin
from mismatch_ext.adapters.verl.driver import servers, weights
from mismatch_ext.adapters.verl.driver.reports import (
    LOSS,
    Checked,
    Report,
    RolloutAnswer,
    check_reports,
)

from mismatch_ext.checks import Checks
from mismatch_ext.config import Action, MismatchConfig, MonitorConfig
from mismatch_ext.errors import ConfigError, EngineError, MismatchError
from tests.peers.verl.recorded import SCALER, recorded, shape

# Importing the adapter has loaded it: every process that collects this file would keep its patches.
plugin.unload()

FAULTS = tomllib.loads(Path(__file__).with_name("report_faults.toml").read_text(encoding="utf-8"))["rows"]
Change = Callable[[dict[str, Any]], None]


def run_of(name: str) -> dict[str, Any]:
    """Return what processes reported in a run: "sglang" as it is recorded, and two that are put together from recorded reports.

    "experts" has the workers of "sglang", with every section in float32, and rollout workers of vLLM that record routing;
    "example" is a dense model in float16.
    """
    found: dict[str, Any] = recorded("sglang" if name == "sglang" else "dense")
    if name == "experts":
        found |= {part: recorded("sglang")[part] for part in ("block", "workers")}
        change_of("rollouts", "records_routing", True)(found)
    elif name == "example":
        found["block"] |= {"precision": {"dtype": "float16"}}
        for kind, field, value in (
            ("workers", "trainer.autocast_dtype", "float16"),
            ("workers", "trainer.scaler", SCALER),
            ("rollouts", "reading.model_dtype", "float16"),
            ("rollouts", "reading.kv_cache_dtype", "float16"),
            ("rollouts", "reading.parameter_dtypes", {"float16": 9}),
        ):
            change_of(kind, field, value)(found)
    return found


def test_recorded_blocks_have_every_setting_of_today() -> None:
    """Or the runs that compare their shapes, minutes long, would be the first to say that these files are old."""
    for name in ("dense", "sglang"):
        block = recorded(name)["block"]
        known = MismatchConfig.parse(block)
        assert known is not None
        assert shape(known.to_dict()) == shape(block), name


def parsed(found: Any) -> tuple[MismatchConfig, list[Report], list[RolloutAnswer]]:
    """Return the arguments of `check_reports` for what a run reported."""
    block = MismatchConfig.parse(found["block"])
    assert block is not None
    rollouts = [
        RolloutAnswer(engine=answer["engine"], expected=answer["expected"], reports=answer["reports"])
        for answer in found["rollouts"]
    ]
    return block, found["workers"], rollouts


def checked(name: str, change: Change = lambda run: None) -> Checked:
    """Check what a recorded run reported, with a change."""
    found = run_of(name)
    change(found)
    return check_reports(*parsed(found))


def change_of(kind: str, field: str, value: Any) -> Change:
    """Return the change of a field in the reports of all workers or rollout workers, or of the last of two."""

    def change(run: dict[str, Any]) -> None:
        answer = run["rollouts"][0]
        reports = run["workers"] if kind.startswith("worker") else answer["reports"]
        if not kind.endswith("s"):
            reports.append(copy.deepcopy(reports[0]))
            reports[-1] |= {"rank": 1} if kind == "worker" else {}
            reports = reports[-1:]
        answer["expected"] = len(answer["reports"])
        *path, name = field.split(".")
        for report in reports:
            place = functools.reduce(operator.getitem, path, report)
            assert name in place, f"no process reports {name}"
            place[name] = value

    return change


@pytest.mark.parametrize("name", ["experts", "example", "sglang"])
def test_processes_that_report_what_was_asked_for_are_right(name: str) -> None:
    run = run_of(name)
    found = checked(name)
    assert found.worker == run["workers"][0] and found.worker["loss"] in (LOSS, "verl.workers.utils.losses")
    assert found.trainer.device == "cpu" and found.audit is not None and not found.audit.findings
    assert found.engine.engine == run["rollouts"][0]["engine"]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"kl": {"coef": 0.1}}, "kl"),
        ({"correction": {"preset": "decoupled_token_is", "off_policy_threshold": 0.1}}, "correction.off_policy_threshold"),
    ],
)  # fmt: skip
def test_a_worker_whose_loss_was_replaced_is_refused_whatever_needs_ours(section: dict[str, Any], key: str) -> None:
    def running(loss: str) -> Change:
        def change(run: dict[str, Any]) -> None:
            run["block"] |= section
            change_of("workers", "loss", loss)(run)

        return change

    assert checked("example", running(LOSS)).worker["loss"] == LOSS
    with pytest.raises(ConfigError) as caught:
        checked("example", running("verl.workers.utils.losses"))
    assert f"mismatch.{key}: it takes a loss of this package, and the worker of rank 0 runs with" in str(caught.value)


@pytest.mark.parametrize(("run", "kind", "field", "value", "error", "named"), FAULTS)
def test_processes_that_are_not_as_asked_are_refused_by_name(
    run: str, kind: str, field: str, value: str, error: str, named: str
) -> None:
    with pytest.raises(MismatchError) as caught:
        checked(run, change_of(kind, field, json.loads(value)))
    assert type(caught.value).__name__ == error and named in str(caught.value)


@pytest.mark.parametrize("kind", ["workers", "rollouts"])
def test_processes_that_say_nothing_are_refused(kind: str) -> None:
    with pytest.raises(MismatchError, match="no (worker of the actor|rollout server) says"):
        checked("experts", lambda run: run[kind].clear())


def test_a_server_that_sends_no_masks_is_refused_where_they_are_replayed() -> None:
    found = run_of("experts")
    found["block"]["sampling_mask"] = {}
    for report in found["workers"]:
        report["sampling_mask"] = True
    with pytest.raises(EngineError, match="rollout worker 0 is of a server that sends no sampling masks"):
        check_reports(*parsed(found))
    patches = [{"name": "vllm/top_logprobs"}]
    for report in found["rollouts"][0]["reports"]:
        report |= {"sends_masks": True, "patches": patches}
    assert check_reports(*parsed(found)).patches == patches


@pytest.mark.parametrize(
    ("run", "needed"), [("experts", "worker_extension_cls as this package sets it"), ("sglang", "server class of this package")]
)  # fmt: skip
def test_a_rollout_server_without_the_package_is_refused_with_its_own_error(run: str, needed: str) -> None:
    block, workers, rollouts = parsed(run_of(run))
    cause = AttributeError("no attribute 'mismatch_report'")
    silent = RolloutAnswer(engine=rollouts[0].engine, expected=1, failure=cause)
    with pytest.raises(EngineError, match="rollout server 1 does not say what it runs with: AttributeError") as caught:
        check_reports(block, workers, [*rollouts, silent])
    assert needed in str(caught.value) and caught.value.__cause__ is cause


def replica(engine: str, servers: list[Any]) -> SimpleNamespace:
    """Return what verl says of a rollout server."""
    config = SimpleNamespace(name=engine, data_parallel_size=1)
    return SimpleNamespace(config=config, world_size=1, servers=servers)


@pytest.mark.parametrize(("size", "check", "said"), [(2, "warn", True), (1, "warn", False), (2, "off", False)])
def test_weights_that_only_the_first_engine_could_prove_are_said_to_be_unverified(
    size: int, check: Action, said: bool
) -> None:
    found = weights.unverified({"data_parallel_size": size}, MonitorConfig(weight_sync=check))
    assert (found is not None and "data_parallel_size=2: the rollout's weights are not verified" in found) == said


def test_servers_that_are_silent_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is down has many servers. Ray's clock stands in: the wait itself is what is counted."""
    now, asked, waits = [0.0], [], []

    def get(refs: list[int], timeout: float) -> list[Any]:
        waits.append((len(asked), timeout))
        now[0] += timeout
        raise ray.exceptions.GetTimeoutError(f"{refs}")

    class Server:
        def __init__(self, engine: str) -> None:
            ask = SimpleNamespace(remote=lambda *_: asked.append(engine))
            if engine == "vllm":
                self.__ray_call__ = ask
            elif engine == "sglang":
                self.mismatch_report = ask

    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ray, "get", get)
    engines = ["vllm", "vllm", "sglang"]
    replicas = [replica(e, [Server(e)]) for e in engines]
    answers = servers.read_rollouts(replicas, MismatchConfig(), 50)
    assert waits == [(3, 60), (3, 0), (3, 0)]
    assert [(a.engine, type(a.failure)) for a in answers] == [(e, ray.exceptions.GetTimeoutError) for e in engines]


def test_a_megatron_worker_without_this_packages_checks_is_refused() -> None:
    """The report is that of a real Megatron worker, without its `kl` and `lr`; the block asks for routing alone."""
    block = MismatchConfig.parse({"routing": {"mode": "R3"}, "monitor": {"weight_sync": "off"}})
    _, _, answers = parsed(run_of("experts"))
    megatron = recorded("megatron")["workers"][0]
    assert megatron["strategy"] == "megatron" and megatron["patches"]
    assert block is not None and check_reports(block, [megatron], answers).worker == megatron
    with pytest.raises(ConfigError, match="worker of rank 0 runs verl's Megatron replay without this package's checks"):
        check_reports(block, [{**megatron, "patches": []}], answers)


@pytest.mark.filterwarnings("ignore:mismatch. the check")
@pytest.mark.parametrize(
    ("change", "check"),
    [
        (change_of("rollout", "reading.logprobs_mode", "raw_logprobs"), "rollout_workers"),
        (change_of("worker", "strategy", "fsdp"), "workers"),
    ],
)
def test_processes_of_a_run_that_is_only_measured_are_named_if_wrong_and_the_run_goes_on(
    change: Change, check: str
) -> None:
    found = run_of("example")
    found["block"] = {}
    change(found)
    checks = Checks(False)
    checked_run = check_reports(*parsed(found), checks)
    assert check in {failed.check for failed in checks.unwritten}, checks.unwritten
    assert checked_run.engine.engine == "vllm" and checked_run.trainer.device
