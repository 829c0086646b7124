"""Every command and code block of the README does what it says; the demo's own output shows the claim."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.S)
COMMANDS = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines() if line]
COMMANDS += re.findall(r"`(make [^`]+)`", re.sub(r"```.*?```", "", README, flags=re.S))
# Each command is run by the test named here; a command that appears in the README and not here fails.
RUN_BY = {
    "make demo": "test_make_demo_shows_the_claim",
    "make demo MODEL=moe STEPS=2 RUN_DIR=runs/moe": "test_make_demo_with_experts",
    "make test": "test_make_test_is_what_runs_this",
    "make check": "test_make_check",
    "make matrix": "test_make_matrix",
    "make matrix QUICK=1": "test_make_matrix",
    "make bench": "test_make_bench_prints_json_lines",
    'pip install "mismatch-ext[trl,report]"': "test_pip_install",
    "python examples/trl_grpo.py": "test_script_then_report",
    "mismatch-ext report runs/mine/mismatch": "test_script_then_report",
    "python -m examples.r3_loop --steps 2": "test_r3_loop_lowers_the_gap_on_the_same_tokens",
    "python -m examples.replay_gap --out runs/replay_gap": "test_replay_gap_shows_the_claim",
    "python -m examples.kl_placement --out runs/kl_placement.html": "test_kl_placement_example",
    'mismatch-ext readiness MODEL_DIR --prompt "386+47="': "test_readiness",
}
pytestmark = pytest.mark.engine


def shell(command: str, timeout: float = 1400, **env: str) -> str:
    """Run a README command in the checkout with its environment first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def in_readme(beginning: str) -> str:
    """Return the README's command that begins so."""
    return next(command for command in COMMANDS if command.startswith(beginning))


def test_every_command_has_a_test() -> None:
    unknown = [c for c in COMMANDS if not any(c == known or c.startswith(f"{known} --") for known in RUN_BY)]
    assert not unknown
    assert all(name in globals() for name in RUN_BY.values())


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the demo once and return what it printed and its summary."""
    printed = shell(in_readme("make demo"))
    yield printed, json.loads((ROOT / "runs/demo/summary.json").read_text())


def rows_of(summary: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["run"], row["split"]): row for row in summary["rows"]}


WITH_EXPERTS = ("bf16", "bf16-r3", "fp16-r3", "fp32-r3")


def test_make_demo_shows_the_claim(demo: tuple[str, dict[str, Any]]) -> None:
    printed, summary = demo
    rows = rows_of(summary)
    splits = ("eval/familiar", "eval/unfamiliar", "train")
    assert set(rows) == {(run, split) for run in ("bf16", "fp16", "fp32") for split in splits}
    for split in splits:
        bf16, fp16 = rows["bf16", split]["values"], rows["fp16", split]["values"]
        assert bf16["logp_abs_diff_mean"] / fp16["logp_abs_diff_mean"] >= 5, split
        assert bf16["k3_kl"] / fp16["k3_kl"] >= 25, split
        assert rows["fp32", split]["values"]["logp_abs_diff_mean"] <= 1e-4, split
        # The worst of tens of thousands of tokens: float32 alone is off from float64 by as much on the unfamiliar ones.
        assert rows["fp32", split]["values"]["logp_abs_diff_max"] <= 1e-4, split
    for run in ("bf16", "fp32"):
        assert rows[run, "train"]["reward_last"] > rows[run, "train"]["reward_first"] + 0.05, run
    assert "bf16 over FP16, trained distribution" in printed and "report: runs/demo/report.html" in printed
    familiar, unfamiliar = (rows["bf16", split]["values"]["logp_abs_diff_mean"] for split in splits[:2])
    assert unfamiliar > 2 * familiar


def test_demo_report_is_one_file_with_the_tables_figures(demo: tuple[str, dict[str, Any]]) -> None:
    html = (ROOT / "runs/demo/report.html").read_text(encoding="utf-8")
    markup = re.sub(r"(<script\b[^>]*>).*?(</script>)", r"\1\2", html, flags=re.S)
    assert not re.search(r"""<[^>]+\b(src|href)\s*=""", markup)
    mean = rows_of(demo[1])["bf16", "eval/familiar"]["values"]["logp_abs_diff_mean"]
    assert f"{mean:.2e}".replace("e-0", "e-") in markup or f"{mean:.3g}" in markup


def test_make_demo_with_experts() -> None:
    shell(in_readme("make demo MODEL=moe"))
    rows = rows_of(json.loads((ROOT / "runs/moe/summary.json").read_text()))
    assert {run for run, _ in rows} == set(WITH_EXPERTS)
    assert {split for _, split in rows} == {"eval/familiar", "eval/unfamiliar", "train"}
    for split in ("eval/familiar", "eval/unfamiliar"):
        gaps = [rows[run, split]["values"]["logp_abs_diff_mean"] for run in ("bf16", "fp16-r3", "fp32-r3")]
        assert gaps == sorted(gaps, reverse=True) and gaps[2] <= 1e-4, split


def test_make_demo_measures_experts_too(demo: tuple[str, dict[str, Any]]) -> None:
    summary = json.loads((ROOT / "runs/demo/moe/summary.json").read_text())
    rows = rows_of(summary)
    assert set(rows) == {(run, split) for run in WITH_EXPERTS for split in ("eval/familiar", "eval/unfamiliar")}
    for split in ("eval/familiar", "eval/unfamiliar"):
        k3 = [rows[run, split]["values"]["k3_kl"] for run in WITH_EXPERTS]
        assert k3 == sorted(k3, reverse=True), split
        assert rows["fp32-r3", split]["values"]["logp_abs_diff_max"] <= 1e-3
    replay = {(row["run"], row["split"]): row for row in summary["replay"]}
    for split in ("eval/familiar", "eval/unfamiliar"):
        assert replay["fp32-r3", split]["flips"] == 0 < replay["fp16-r3", split]["flips"]
        native, replayed = replay["bf16-r3", split]["k3_kl"]
        assert replayed < (0.8 if split == "eval/familiar" else 0.4) * native, split
    assert "The same tokens, routed by the trainer itself -> replayed" in demo[0]
    assert "report: runs/demo/moe/report.html" in demo[0]


def test_make_test_is_what_runs_this() -> None:
    # Running it from within itself would not end; under CI this very process must have been started by it.
    if "CI" in os.environ:
        assert os.environ.get("MISMATCH_MAKE_TEST") == "1"
    assert "-m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/peers" in shell("make -n test")


def test_make_matrix() -> None:
    # It runs tests that this suite runs too, once per version: what it would start is looked at, what it wrote is held against
    # the ranges in tests/unit/test_versions.py.
    assert "-m tests.matrix --also trl==1.14.2 --quick" in shell(f"{in_readme('make matrix QUICK=1')} -n")


def test_make_check() -> None:
    # `make test` leaves these tests to this one: they run once.
    assert re.search(r"[1-9]\d{3} passed", shell("make check"))


def test_make_bench_prints_json_lines() -> None:
    rows = [json.loads(line) for line in shell("make bench", timeout=1400).splitlines() if not line.startswith("make")]
    assert rows and all(set(row) == {"name", "ours", "theirs", "ratio", "equal"} for row in rows)


def test_script_then_report() -> None:
    shell(in_readme("python examples/trl_grpo.py"))
    printed = shell(in_readme("mismatch-ext report"))
    assert "runs/mine/mismatch/report.html" in printed and (ROOT / "runs/mine/mismatch/report.html").is_file()


def test_kl_placement_example() -> None:
    printed = shell(in_readme("python -m examples.kl_placement"))
    assert "K1 reward" in printed and (ROOT / "runs/kl_placement.html").stat().st_size > 1_000_000


def test_r3_loop_lowers_the_gap_on_the_same_tokens() -> None:
    line = re.compile(r"step (\d+): reward (\S+), k3 (\S+) -> (\S+) with replay, max\|Δlogp\| (\S+) -> (\S+)")
    printed = shell(in_readme("python -m examples.r3_loop"))
    steps = [[float(value) for value in match] for match in line.findall(printed)]
    assert [step[0] for step in steps] == [1, 2]
    for _, correct, native, replayed, *_ in steps:
        assert 0 < correct < 1
        assert 0 < replayed < native < 1e-2


def test_replay_gap_shows_the_claim() -> None:
    printed = shell(in_readme("python -m examples.replay_gap"), timeout=1400)
    runs = json.loads((ROOT / "runs/replay_gap/summary.json").read_text())["runs"]

    def left(run: str, split: str, name: str) -> float:
        return runs[run][split][name] / runs[run][split][f"native/{name}"]

    for split in ("eval/familiar", "eval/unfamiliar"):
        assert runs["bf16"][split]["native/tokens"] == runs["bf16"][split]["tokens"] >= 100_000
    assert left("bf16", "eval/familiar", "k3_kl") <= 1 / 2
    assert left("bf16", "eval/familiar", "logp_abs_diff_max") <= 1 / 2
    assert left("bf16", "eval/unfamiliar", "k3_kl") <= 1 / 4
    # About 1/5, but one token decides it, and another draw another.
    assert left("bf16", "eval/unfamiliar", "logp_abs_diff_max") <= 1 / 4
    assert runs["bf16"]["eval/unfamiliar"]["f_2"] < 0.1 * runs["bf16"]["eval/unfamiliar"]["native/f_2"]
    for split, found in runs["float32"].items():
        assert found["routing/set_mismatch_frac"] == 0 and found["routing/compared_tokens"] > 10_000, split
    assert "trained distribution: replay leaves" in printed


def test_readiness(dense: Path) -> None:
    printed = shell(in_readme("mismatch-ext readiness").replace("MODEL_DIR", str(dense)))
    assert re.search(r"^float16: (ready|risky)", printed, flags=re.M), printed


def test_pip_install(tmp_path: Path) -> None:
    shell(f"python -m build --wheel --no-isolation --outdir {tmp_path}/dist . && python -m venv {tmp_path}/venv")
    command = in_readme("pip install").replace("pip install", f"{tmp_path}/venv/bin/pip install --no-index --no-deps")
    shell(f"{command} --find-links {tmp_path}/dist")
    # That no requirement pins torch or vLLM is read off the wheel in tests/unit/test_packaging.py.
    assert "mismatch-ext==" in shell(f"cd {tmp_path} && {tmp_path}/venv/bin/pip list --format freeze")


PYTHON = [block for language, block in BLOCKS if language == "python"]


@pytest.mark.parametrize("arguments", ["its own", *range(1, len(PYTHON))])
def test_the_python_blocks_run(dense: Path, moe: Path, tmp_path: Path, arguments: int | str) -> None:
    block = PYTHON[0]
    if isinstance(arguments, int) and "trainer.train()" in PYTHON[arguments]:
        block = PYTHON[arguments].replace("logging_steps=1)", "logging_steps=1, **short)")
    elif isinstance(arguments, int):  # other blocks give other arguments to the first one's trainer
        block = re.sub(r"^args = .*\n", lambda _: PYTHON[arguments], block, flags=re.M)
    assert arguments == "its own" or block != PYTHON[0]
    # The README's model, output folder and a real run's length and device are what a reader replaces too.
    model = moe if '"routing"' in block else dense
    code = block.replace("Qwen/Qwen3-0.6B", str(model)).replace('"run"', repr(str(tmp_path / "run")))
    code = code.replace("use_vllm=True,", "use_vllm=True, **short,")
    setup = """
import os
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
from datasets import Dataset
from examples.arithmetic.task import make_dataset, reward
dataset = Dataset.from_list(make_dataset(8))
short = dict(max_steps=1, per_device_train_batch_size=8, max_completion_length=16, use_cpu=True, report_to="none",
             vllm_max_model_length=64, vllm_gpu_memory_utilization=0.05, gradient_checkpointing=False)
"""
    script = tmp_path / "script.py"
    script.write_text(f"{setup}{code}\nprint('trained', trainer.state.global_step)\nos._exit(0)\n")
    assert "trained 1" in shell(f"python {script}", PYTHONPATH=str(ROOT))
