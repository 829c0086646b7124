"""The real DeepSpeed, ZeRO-2 and ZeRO-3, on one process and on two over gloo: which sections run, and what is refused.

DeepSpeed is in a directory of its own, which `make setup` fills: wherever TRL and transformers find it, they import it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import ROOT, Ran, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_deepspeed as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_deepspeed")

pytestmark = pytest.mark.engine
DEEPSPEED = Path(sys.prefix) / "deepspeed"
BUILT = Path(sys.prefix) / "torch_extensions"
"""What DeepSpeed compiles, once for each environment; tests/conftest.py removes the locks of builds that were killed."""
STAGES = (2, 3)
FLOAT32 = {"precision": {"dtype": "float32"}}
FP16 = {"precision": {"dtype": "float16"}}
PERIOD = {"period": 2, "warmup_steps": 0}
# The model is small, and its loss at DeepSpeed's first scale overflows.
SMALL_SCALE = {"fp16": {"enabled": "auto", "initial_scale_power": 8}}
DENSE: dict[str, dict[str, Any]] = {
    "monitor": {"block": FLOAT32, "overrides": {"save_strategy": "steps", "save_steps": 2}},
    "measured": {"block": {}},
    "unverified": {"block": {**FLOAT32, "monitor": {"weight_sync": "off"}}},
    "float16": {"block": {**FP16, "lr": PERIOD}, "more": SMALL_SCALE},
    "overflows": {"block": {**FP16, "lr": PERIOD}},
    "bfloat16": {"block": {"precision": {"dtype": "bfloat16"}}},
    "lr": {"block": {**FLOAT32, "lr": PERIOD}},
    "correction": {"block": {**FLOAT32, "correction": {"preset": "decoupled_token_is"}}},
    "sampling_mask": {"block": {**FLOAT32, "sampling_mask": {}}, "overrides": {"top_k": 8}},
    "loss_scale": {"block": {"precision": {"dtype": "float16", "init_scale": 256.0}}},
    "half_reduced": {"block": {"lr": PERIOD}, "more": {"scheduler": {"type": "WarmupLR", "params": {}}}},
    "stale": {"block": FLOAT32, "stale": True},
}
REFUSED = {
    **{("loss_scale", stage): "mismatch.precision.init_scale" for stage in STAGES},
    **{("half_reduced", stage): "mismatch.lr with a scheduler in DeepSpeed's configuration" for stage in STAGES},
    **{("stale", stage): "weight update 3: stale" for stage in STAGES},
}


def launch(processes: int, out: Path, limit: int = 600, **payload: Any) -> Any:
    """Run trainers one after the other on some processes; return what each of these found.

    The first of an environment compiles, and who comes beside it waits for that, within the limit in seconds.
    """
    given = {"out": str(out), "result": str(out / "result.json"), "limit": limit, **payload}
    scenario = scenarios.several
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"),
        *("-m", scenario.module, scenario.name, json.dumps(given, default=str)),
    ]
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(DEEPSPEED),
        "TORCH_EXTENSIONS_DIR": str(BUILT),
        # DeepSpeed compiles what ranks on one machine talk by, and asks for ninja by its name.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        stdout, stderr = process.communicate(timeout=limit + 60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher passes it on to its ranks
        stdout, stderr = process.communicate(timeout=60)
    result = out / "result.json"
    found = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else None
    return Ran(process.returncode, found, stdout, stderr).expect()


def series(run: dict[str, Any], name: str) -> list[float]:
    """Return a metric of each step."""
    return [entry[name] for entry in run["logged"]]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.nightly), 3])
def stage(request: pytest.FixtureRequest) -> int:
    """Return a stage of ZeRO."""
    return int(request.param)


@pytest.fixture(scope="module")
def dense_runs(stage: int, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what each run of a dense model found on one process."""
    out = tmp_path_factory.mktemp(f"zero{stage}")
    runs = {name: {"model": dense, "stage": stage, **run} for name, run in DENSE.items()}
    runs["resumed"] = {**runs["monitor"], "resume": str(out / "monitor/checkpoint-2")}
    (found,) = launch(1, out, runs=runs)
    return dict(found)


def test_every_section_runs_or_is_refused_by_name_before_an_engine(stage: int, dense_runs: dict[str, Any]) -> None:
    for name, run in dense_runs.items():
        said = run.get("refused")
        if (name, stage) in REFUSED:
            assert said is not None and REFUSED[name, stage] in said, (name, run)
            # Nothing was built, but for what went wrong in training.
            assert run["step"] == (2 if name == "stale" else None), name
            continue
        assert said is None, (name, said)
        assert run["stage"] == stage and len(run["logged"]) == 3
        assert run["version"] == 3
        verdicts = {"unverified": None, "overflows": "unchanged"}
        assert run["verdict"] == verdicts.get(name, "in_sync"), name


def test_both_sides_agree_in_float32_after_every_update(dense_runs: dict[str, Any]) -> None:
    # With masks, over the eight tokens that are left of each; over all of them the truncated mass would stand in it.
    for name in ("monitor", "lr", "correction", "sampling_mask"):
        assert max(series(dense_runs[name], "mismatch/logp_abs_diff_mean")) < 1e-5
        assert max(series(dense_runs[name], "mismatch/weight_sync_gap")) < 1e-5
    # The weights did move.
    assert len({run["weights"] for run in dense_runs.values() if "weights" in run}) > 3


def test_a_config_that_does_not_act_measures(dense_runs: dict[str, Any]) -> None:
    run = dense_runs["measured"]
    assert run["failed"] == {}
    for name in ("mismatch/k3_kl", "mismatch/weight_sync_gap"):
        assert min(series(run, name)) > 0


def test_verifying_changes_no_bit_of_what_is_learned(dense_runs: dict[str, Any]) -> None:
    assert dense_runs["monitor"]["weights"] == dense_runs["unverified"]["weights"]


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(dense_runs: dict[str, Any]) -> None:
    whole, resumed = dense_runs["monitor"], dense_runs["resumed"]
    assert resumed["logged"][-1]["loss"] == whole["logged"][-1]["loss"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["steps"] == whole["steps"] == [3, 0]


def test_half_precision_is_deepspeeds_own_with_float32_masters(dense_runs: dict[str, Any]) -> None:
    for name in ("float16", "bfloat16"):
        assert dense_runs[name]["parameters"] == [f"torch.{name}"]
    # An eighth of bfloat16's rounding; the two sample other tokens, so that a quarter is asked for.
    halves = [max(series(dense_runs[name], "mismatch/weight_sync_gap")) for name in ("float16", "bfloat16")]
    assert halves[0] < halves[1] / 4
    assert series(dense_runs["float16"], "mismatch/loss_scale") == [256.0] * 3


def test_the_rate_is_multiplied_in_the_engines_own_step(dense_runs: dict[str, Any]) -> None:
    for name in ("lr", "float16"):
        run = dense_runs[name]
        assert series(run, "mismatch/lr_multiplier") == [1.0, 1.0, 0.5]
        # The schedule is linear over three steps.
        rates = [rate for (rate,) in run["rates"]]
        assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 0.5 * 1e-3 / 3], rel=1e-12)
        assert series(run, "learning_rate") == pytest.approx(rates, rel=1e-12)


def test_steps_that_deepspeed_skips_are_not_counted(dense_runs: dict[str, Any]) -> None:
    run = dense_runs["overflows"]
    assert run["steps"] == [3, 3] and run["rates"] == [[], [], []]
    assert series(run, "mismatch/overflow_steps") == [1.0, 2.0, 3.0]
    scales = series(run, "mismatch/loss_scale")
    assert scales[0] == 2.0**16 and scales == sorted(scales, reverse=True) and scales[-1] < scales[0]
    # By the period, the second step would have been halved.
    assert series(run, "mismatch/lr_multiplier") == [1.0] * 3
    assert series(run, "learning_rate") == [1e-3] * 3


@pytest.fixture(scope="module")
def moe_runs(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of two processes found with experts, an engine for each."""
    replays = {**FLOAT32, "routing": {"mode": "R3", "measured": 1.0}, "kl": {"coef": 0.05}}
    runs: dict[str, Any] = {f"R3 {stage}": {"model": moe, "stage": stage, "block": replays} for stage in STAGES}
    masked = {**FLOAT32, "routing": {"mode": "R2"}, "sampling_mask": {}}
    runs["R2 3"] = {"model": moe, "stage": 3, "block": masked, "overrides": {"top_k": 8}}
    runs["float16 2"] = {"model": moe, "stage": 2, "block": {**FP16, "routing": {"mode": "R3"}}, "more": SMALL_SCALE}
    half = {**SMALL_SCALE, "communication_data_type": "fp16"}
    runs["reduced 2"] = {**runs["float16 2"], "more": half}
    found = launch(2, tmp_path_factory.mktemp("ranks"), runs=runs)
    assert len(found) == 2
    return list(found)


@pytest.mark.nightly
def test_two_processes_replay_routes_and_verify_every_update(moe_runs: list[dict[str, Any]]) -> None:
    for stage in STAGES:
        for rank in moe_runs:
            run = rank[f"R3 {stage}"]
            assert run.get("refused") is None, run
            assert (run["stage"], run["verdict"], run["version"]) == (stage, "in_sync", 3)
            assert max(series(run, "mismatch/logp_abs_diff_mean")) < 1e-5
            assert max(series(run, "mismatch/weight_sync_gap")) < 1e-5
            assert series(run, "mismatch/routing/set_mismatch_frac") == [0.0] * 3
        first, second = (rank[f"R3 {stage}"] for rank in moe_runs)
        assert first["logged"] == second["logged"]
        # Each holds another half of the weights, or both all of them.
        assert (first["weights"] == second["weights"]) == (stage == 2)
    for rank in moe_runs:
        assert rank["R2 3"].get("refused") is None and rank["R2 3"]["verdict"] == "in_sync"
        assert max(series(rank["R2 3"], "mismatch/logp_abs_diff_mean")) < 1e-5
        assert series(rank["R2 3"], "mismatch/sampling_mask_size") == [8.0] * 3
        assert rank["float16 2"].get("refused") is None and rank["float16 2"]["verdict"] == "in_sync"


@pytest.mark.nightly
def test_gradients_of_float16_are_summed_in_float32_unless_told_otherwise(moe_runs: list[dict[str, Any]]) -> None:
    for rank in moe_runs:
        said = rank["reduced 2"]["refused"]
        assert said.startswith("PrecisionError") and "gradient reduction: expected float32, found float16" in said
