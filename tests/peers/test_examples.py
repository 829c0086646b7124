"""Examples run as plain scripts with the real peers, and write what they measured; two do in tests/evidence alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from tests.commands import shell
from tests.peers.engines.served import answering
from tests.peers.engines.sglang_environment import HELD, MAIN, PYTHON, environment, stub_uses
from tests.peers.engines.vllm_server import named_vllm
from tests.rendezvous import free_port, rendezvous

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text("utf-8"))
BATCH = ("--per_device_train_batch_size", "16")
pytestmark = pytest.mark.engine


def python(*arguments: str | Path, cwd: Path = ROOT) -> str:
    """Run a command as a user does, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **rendezvous(), "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1", "PYTHONPATH": ""},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


SAID = re.compile(
    r"step (\d+): reward (\S+), length \S+, learning_rate \S+, native/k3_kl (\S+), k3_kl (\S+), "
    r"routing/set_mismatch_frac (\S+), weights (\w+)"
)
REPORTED = (
    "reward", "length", "learning_rate", "loss", "grad_norm", "mismatch/k3_kl", "mismatch/native/k3_kl",
    "mismatch/weight_sync_gap", "mismatch/lr_multiplier", "mismatch/loss_scale", "mismatch/rollout_is_mean",
    "mismatch/kl_ref_k1", "mismatch/routing/set_mismatch_frac",
)  # fmt: skip


def check_loop(printed: str, folder: Path) -> list[tuple[float, ...]]:
    """Check what both engines' loops print, write and report; return step, reward, k3 without and with replay, flips."""
    said = SAID.findall(printed)
    # Every weight update was proven by prefill; it would also be an error.
    assert [(step, status) for step, *_, status in said] == [("1", "in_sync"), ("2", "in_sync")], printed
    run = read_run(folder / "mismatch")
    assert [record.step for record in run.steps] == [1, 2] and [end.status for end in run.ends] == ["completed"]
    for record in run.steps:
        missing = [name for name in REPORTED if record.metrics.get(name) is None]
        assert not missing, record.metrics
        # Nothing ran past the routes, and every weight of the correction is near 1, as the gap says.
        assert record.metrics["mismatch/routing/other_passes"] == 0
        assert record.metrics["mismatch/rollout_is_mean"] == pytest.approx(1, abs=0.05)
    assert set(run.header["config"]) >= {"precision", "routing", "correction", "kl", "lr", "monitor"}
    assert run.header["trainer"]["autocast_dtype"] == run.header["engine"]["model_dtype"] == "float16"
    return [tuple(map(float, row[:-1])) for row in said]


@pytest.mark.nightly
def test_the_loop_with_vllm() -> None:
    # The README's own command, into its own folder.
    for _, correct, native, replayed, flips in check_loop(
        shell("python -m examples.loop --steps 2"), ROOT / "runs/loop"
    ):
        assert 0 < correct < 1
        # A few thousand tokens are too few to say how much smaller. With replay, engine and trainer are off by the rounding of
        # the compute dtype some tens of times over; routes or weights of other tokens are off by a nat or more.
        assert native > 0 and 0 < replayed < 1e-2
        # A replay that does nothing would move no token, and routes of other tokens would differ nearly everywhere.
        assert 0 < flips < 0.5 and native != replayed


@pytest.mark.nightly
def test_the_loop_with_sglang(tmp_path: Path) -> None:
    log = tmp_path / "stub.log"
    done = subprocess.run(
        [PYTHON, "examples/loop.py", "--engine", "sglang", "--steps", "2", "--prompts", "4", "--output_dir", tmp_path],
        cwd=ROOT,
        env=environment(HELD or MAIN, log),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    for _, _, own, replayed, _ in check_loop(done.stdout + done.stderr, tmp_path):
        # Hardly an expert flips in float16, so replay has little to remove; what is left is rounding.
        assert 0 < replayed < min(1e-5, 1.5 * own)
    assert stub_uses(log)["called"] == 0


@pytest.mark.nightly
def test_the_server_example_trains_a_dense_model_in_float16(tmp_path: Path) -> None:
    port, script = free_port(), ["bash", "examples/trl_server.sh"]
    model = ROOT / "examples/arithmetic/models/dense"
    serve = [*script, "serve", str(model), "--dtype", "float16", "--host", "127.0.0.1", "--port", str(port)]
    variables = os.environ | rendezvous() | {
        "PYTHON": sys.executable, "TRANSFER": "mismatch_http", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": named_vllm(tmp_path), "PYTHONUTF8": "1",
    }  # fmt: skip
    flags = ["--max-model-len", "160", "--enforce-eager", "--generation-config", "vllm"]
    with answering([*serve, *flags], port, variables, tmp_path / "server.log") as url:
        done = subprocess.run(
            [
                *(*script, "train", "--output_dir", tmp_path / "run", "--max_steps", "2", "--eval_prompts", "8", *BATCH),
                *("--mismatch", '{"precision": {"dtype": "float16"}}'),
            ],
            cwd=ROOT, env=variables | {"SERVER": url}, capture_output=True, encoding="utf-8", timeout=400,
        )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    run = read_run(tmp_path / "run/mismatch")
    trained = [record.metrics for record in run.steps if "mismatch/weight_sync_gap" in record.metrics]
    assert len(trained) == 2 and not [event for event in run.events if event.level == "error"]
    for metrics in trained:
        # The weights of both sides are the same, and their float16 kernels are not.
        assert 0 < metrics["mismatch/logp_abs_diff_mean"] < 1e-2 and metrics["mismatch/loss_scale"] >= 1


SEEDS = {
    "fp16": ("loss_scale", "logp_abs_diff_mean"),
    "r3": ("native/k3_kl", "routing/set_mismatch_frac"),
    "lr": ("lr_multiplier",),
    "kl": ("kl_ref_k1", "kl_coef"),
}
"""What each feature's example must have logged."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "r3" else pytest.mark.nightly) for name in SEEDS]
)
def test_the_example_of_a_feature(name: str, tmp_path: Path) -> None:
    config = f"examples/configs/{name}.yaml"
    steps = "4" if name == "lr" else "1"
    python(
        "examples/trl_grpo.py",
        "--config",
        config,
        "--output_dir",
        tmp_path,
        "--max_steps",
        steps,
        "--eval_prompts",
        "8",
        *BATCH,
    )
    last = read_run(tmp_path / "mismatch").steps[-1].metrics
    assert all(last.get(f"mismatch/{metric}") is not None for metric in SEEDS[name]), last
    if name == "lr":
        assert last["mismatch/lr_multiplier"] == 0.5


USAGES = """
import runpy, sys
from pathlib import Path
before = list(sys.path)
for script in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        del sys.modules[name]
    sys.path[:], sys.argv = [str(Path(script).parent), *before], [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        pass
"""
"""Runs each file with nothing of the repository on the path but its own folder, as Python runs it."""


def test_each_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    names = [name for name in EXAMPLES if name != "verl_cpu"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", USAGES, *(ROOT / f"examples/{name}.py" for name in names)],
        cwd=tmp_path, env={**os.environ, "PYTHONUTF8": "1", "PYTHONPATH": ""}, capture_output=True, encoding="utf-8",
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert re.findall(r"^usage: (\w+)\.py", done.stdout, flags=re.M) == names
