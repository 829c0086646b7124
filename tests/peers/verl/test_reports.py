"""Before the first step: every refusal of what workers and rollout servers report, on reports that real processes sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from mismatch_ext.errors import ConfigError, EngineError, MismatchError, PeerVersionError, PrecisionError
from tests.peers.verl.recorded import SCALER, recorded, shape

# Importing the adapter has loaded it: every process that collects this file would keep its patches.
plugin.unload()

Change = Callable[[dict[str, Any]], None]


def run_of(name: str) -> dict[str, Any]:
    """Return what processes reported in a run: "sglang" as it is recorded, and two that are put together from recorded reports.

    "experts" has the workers of "sglang", with every section in float32, and rollout workers of vLLM that record routing;
    "example" is a dense model in float16.
    """
    found: dict[str, Any] = recorded("sglang" if name == "sglang" else "dense")
    if name == "experts":
        found |= {part: recorded("sglang")[part] for part in ("block", "workers")}
        everywhere("rollout", "records_routing", True)(found)
    elif name == "example":
        found["block"] |= {"precision": {"dtype": "float16"}}
        for change in (
            everywhere("trainer", "autocast_dtype", "float16", "trainer"),
            everywhere("trainer", "scaler", SCALER, "trainer"),
            everywhere("rollout", "model_dtype", "float16", "reading"),
            everywhere("rollout", "kv_cache_dtype", "float16", "reading"),
            everywhere("rollout", "parameter_dtypes", {"float16": 9}, "reading"),
        ):
            change(found)
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


def worker(name: str, value: Any, *path: str) -> Change:
    """Return the change of one field in the report of the last worker; of two, where the run had one."""
    return lambda run: put(second(run["workers"], rank=1), name, value, *path)


def rollout(name: str, value: Any, *path: str) -> Change:
    """Return the same for the last rollout worker."""

    def change(run: dict[str, Any]) -> None:
        answer = run["rollouts"][0]
        put(second(answer["reports"]), name, value, *path)
        answer["expected"] = len(answer["reports"])

    return change


def everywhere(kind: str, name: str, value: Any, *path: str) -> Change:
    """Return the change of one field in the reports of all processes of a kind."""

    def change(run: dict[str, Any]) -> None:
        for report in run["workers"] if kind == "trainer" else run["rollouts"][0]["reports"]:
            put(report, name, value, *path)

    return change


def second(reports: list[dict[str, Any]], **other: Any) -> dict[str, Any]:
    """Add a copy of the first report, and return it."""
    reports.append({**copy.deepcopy(reports[0]), **other})
    return reports[-1]


def put(report: dict[str, Any], name: str, value: Any, *path: str) -> None:
    for step in path:
        report = report[step]
    assert name in report, f"no process reports {name}"
    report[name] = value


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
            everywhere("trainer", "loss", loss)(run)

        return change

    assert checked("example", running(LOSS)).worker["loss"] == LOSS
    with pytest.raises(ConfigError) as caught:
        checked("example", running("verl.workers.utils.losses"))
    assert f"mismatch.{key}: it takes a loss of this package, and the worker of rank 0 runs with" in str(caught.value)


DISABLED = {**SCALER, "enabled": False, "scale": 1.0}


@pytest.mark.parametrize(
    ("run", "change", "error", "named"),
    [
        ("experts", worker("routing", None), ConfigError, "mismatch.routing.mode: 'R3' was asked for, and the worker of rank 1"),
        ("example", worker("routing", "R3"), ConfigError, "mismatch.routing.mode: None was asked for"),
        ("experts", worker("lr", None), ConfigError, "mismatch.lr: True was asked for, and the worker of rank 1"),
        ("experts", worker("sampling_mask", True), ConfigError, "mismatch.sampling_mask: False was asked for, and the worker of"),
        ("experts", worker("loss", "verl.workers.utils.losses"), ConfigError, f"not of {LOSS}"),
        ("experts", rollout("records_routing", False), EngineError, "rollout worker 1 does not record routing: vllm 0.30.0"),
        ("experts", rollout("version", "0.23.0", "reading"), PeerVersionError, "runs vllm 0.23.0, which is outside"),
        ("example", worker("scaler", DISABLED, "trainer"), ConfigError, "trainer.scaler="),
        ("experts", worker("torch", "2.12.0", "versions"), ConfigError, "the worker of rank 0 with {"),
        ("experts", worker("engine", "FSDPEngineWithLMHead"), ConfigError, "engine='FSDPEngineWithLMHead'"),
        ("experts", rollout("logprobs_mode", "raw_logprobs", "reading"), ConfigError, "logprobs_mode='raw_logprobs'"),
        ("experts", lambda run: run["workers"].clear(), ConfigError, "no worker of the actor says"),
        ("experts", lambda run: run["rollouts"].clear(), EngineError, "no rollout server says"),
        ("experts", lambda run: run["rollouts"][0]["reports"].clear(), EngineError, "has 1 workers, and 0 of them say"),
    ],
)  # fmt: skip
def test_one_process_that_is_not_as_asked_is_refused_by_name(
    run: str, change: Change, error: type[MismatchError], named: str
) -> None:
    with pytest.raises(error) as caught:
        checked(run, change)
    assert named in str(caught.value)


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
    ("change", "named"),
    [
        (everywhere("trainer", "autocast_dtype", "bfloat16", "trainer"), "trainer autocast: expected float16, found bfloat16"),
        (everywhere("rollout", "model_dtype", "bfloat16", "reading"), "engine dtype: expected float16, found bfloat16"),
        (everywhere("rollout", "kv_cache_dtype", "fp8_e4m3", "reading"), "engine KV cache"),
    ],
)  # fmt: skip
def test_another_dtype_than_the_block_asks_for_is_refused(change: Change, named: str) -> None:
    with pytest.raises(PrecisionError) as caught:
        checked("example", change)
    assert named in str(caught.value)


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


def replica(engine: str, *, size: int = 1, ranks: int = 1, servers: list[Any]) -> SimpleNamespace:
    """Return what verl says of a rollout server."""
    config = SimpleNamespace(name=engine, data_parallel_size=size)
    return SimpleNamespace(config=config, world_size=ranks, servers=servers)


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
    replicas = [replica(e, servers=[Server(e)]) for e in engines]
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
        (rollout("logprobs_mode", "raw_logprobs", "reading"), "rollout_workers"),
        (worker("strategy", "fsdp"), "workers"),
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
