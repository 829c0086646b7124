"""The README's commands and its Python block, as a reader runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import ROOT, shell

README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = """
import os
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
short = dict(max_steps=1, per_device_train_batch_size=8, max_completion_length=16, use_cpu=True, report_to="none",
             vllm_max_model_length=64, vllm_gpu_memory_utilization=0.05, gradient_checkpointing=False)
"""
pytestmark = pytest.mark.engine


def in_readme(beginning: str) -> str:
    """Return the README's command that begins so."""
    return re.findall(rf"^ *({re.escape(beginning)}.*)$", README, flags=re.M)[0]


@pytest.mark.nightly
def test_a_run_by_the_example_and_its_report() -> None:
    shell(in_readme("python examples/trl_grpo.py"))
    assert "runs/mine/mismatch/report.html" in shell(in_readme("mismatch-ext report runs/"))
    assert (ROOT / "runs/mine/mismatch/report.html").is_file()


def test_the_python_block_trains(dense: Path, tmp_path: Path) -> None:
    block, _ = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    for stands_there, here in (
        ('"Qwen/Qwen3-0.6B"', f'"{dense}"'),
        ('output_dir="run"', f'output_dir="{tmp_path}/run"'),
        ("use_vllm=True,", "use_vllm=True, **short,"),
    ):
        assert stands_there in block
        block = block.replace(stands_there, here)
    script = tmp_path / "block.py"
    script.write_text(f"{SETUP}{block}\nprint('trained', trainer.state.global_step)\nos._exit(0)\n", encoding="utf-8")
    assert "trained 1" in shell(f"python -u {script}", PYTHONPATH=str(ROOT))


def test_the_doctor_on_a_model_of_the_repository() -> None:
    said = shell(in_readme("mismatch-ext doctor"))
    assert "Clean: what is left is rounding" in said, said


def test_compat_and_readiness(dense: Path) -> None:
    assert "`mismatch-ext compat`" in README
    table = shell("mismatch-ext compat")
    assert "TRL GRPO + vLLM" in table and "verl + vLLM" in table, table
    told = shell(f'mismatch-ext readiness {dense} --prompt "386+47="')
    assert re.search(r"^float16: (ready|risky)", told, flags=re.M), told
