"""What of the README takes too long for every landing: the demo in small, its other Python blocks, and the installation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.peers.test_readme import EVERY_LANDING
from tests.readme import PYTHON, ROOT, in_readme, run_block, shell

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("block", sorted(set(range(len(PYTHON))) - set(EVERY_LANDING)))
def test_the_other_python_blocks_run(tmp_path: Path, block: int) -> None:
    models = {kind: tiny_model(kind, tmp_path / kind) for kind in ("dense", "moe")}
    run_block(block, models, tmp_path)


def test_pip_install(tmp_path: Path) -> None:
    shell(f"python -m build --wheel --no-isolation --outdir {tmp_path}/dist . && python -m venv {tmp_path}/venv")
    command = in_readme("pip install").replace("pip install", f"{tmp_path}/venv/bin/pip install --no-index --no-deps")
    shell(f"{command} --find-links {tmp_path}/dist")
    # That no requirement pins torch or vLLM is read off the wheel in tests/unit/test_packaging.py.
    assert "mismatch-ext==" in shell(f"cd {tmp_path} && {tmp_path}/venv/bin/pip list --format freeze")


def test_the_demo_in_small() -> None:
    shell("make demo MODEL=moe STEPS=0 PROMPTS=16 RUN_DIR=runs/smoke")
    summary = json.loads((ROOT / "runs/smoke/summary.json").read_text())
    assert summary["checkpoint"].endswith("examples/arithmetic/models/moe")
    assert {row["run"] for row in summary["rows"]} == {"bf16", "bf16-r3", "fp16-r3", "fp32-r3"}
    for row in summary["rows"]:
        assert summary["tokens"][row["run"]][row["split"]] > 16 and row["values"]["k3_kl"] > 0
    assert set(summary["intervals"]) == {
        *("bf16 over fp16-r3", "bf16-r3 over fp16-r3", "fp32-r3 over float32's rounding"),
        *(f"{run} left by replay" for run in ("bf16-r3", "fp16-r3", "fp32-r3")),
    }
    assert (ROOT / "runs/smoke/report.html").is_file()
    # Nothing but the routes can differ, and in float32 they do not.
    assert {row["run"]: row["flips"] for row in summary["replay"]}["fp32-r3"] == 0
