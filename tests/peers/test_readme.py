"""The README's commands and its Python block, as a reader runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.arithmetic.tokenizer import make_tokenizer
from tests.commands import ROOT, shell

README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = """
import os
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
short = dict(max_steps=1, per_device_train_batch_size=8, max_completion_length=16, use_cpu=True, report_to="none",
             vllm_max_model_length=64, vllm_gpu_memory_utilization=0.05, gradient_checkpointing=False)
"""
PEAK = "import os, resource; print('peak GB', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)"
pytestmark = pytest.mark.engine


def in_readme(beginning: str) -> str:
    """Return the README's command that begins so."""
    return re.findall(rf"^ *({re.escape(beginning)}.*)$", README, flags=re.M)[0]


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


@pytest.mark.nightly
def test_the_line_for_a_cpu_suits_the_blocks_model(tmp_path: Path) -> None:
    """The block's model has 0.6 billion parameters; here one of its sizes has random weights, and prints the memory it took."""
    model = tmp_path / "model"
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    (for_a_cpu,) = re.findall(r"Without a GPU, add `(use_cpu=True, .*?)`", README)
    block, _ = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    block = block.replace('"Qwen/Qwen3-0.6B"', f'"{model}"').replace('output_dir="run"', f'output_dir="{tmp_path}/run"')
    block = block.replace("use_vllm=True,", f"use_vllm=True, {for_a_cpu}, max_steps=1, max_completion_length=16,")
    script = tmp_path / "block.py"
    script.write_text(f"{block}\nprint('trained', trainer.state.global_step)\n{PEAK}\nos._exit(0)\n", encoding="utf-8")
    said = shell(f"python -u {script}", PYTHONPATH=str(ROOT))
    assert "trained 1" in said, said
    print(said.splitlines()[-1])


def test_the_doctor_on_a_model_of_the_repository() -> None:
    said = shell(in_readme("mismatch-ext doctor"))
    assert "Clean: what is left is rounding" in said, said


def test_compat_and_readiness(dense: Path) -> None:
    assert "`mismatch-ext compat`" in README
    table = shell("mismatch-ext compat")
    assert "TRL GRPO + vLLM" in table and "verl + vLLM" in table, table
    told = shell(f'mismatch-ext readiness {dense} --prompt "386+47="')
    assert re.search(r"^float16: (ready|risky)", told, flags=re.M), told
