"""Runs of verl's own trainer on a CPU with SGLang servers, in the environment that holds SGLang."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.arithmetic.task import FAMILIAR_DIGITS
from tests.peers.engines.sglang_environment import OLDEST, PYTHON, environment
from tests.peers.verl.cpu.assets import write_prompts
from tests.peers.verl.main_ppo import DEVICE, GRPO, PROMPTS, ROOT, VerlRun, cpu_paths, logging, run_command

SGLANG = (
    "actor_rollout_ref.rollout.name=sglang",
    "++actor_rollout_ref.rollout.engine_kwargs.sglang.device=cpu",
    "++actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=torch_native",
    "++actor_rollout_ref.rollout.engine_kwargs.sglang.sampling_backend=pytorch",
    "++actor_rollout_ref.rollout.engine_kwargs.sglang.grammar_backend=none",
    "++actor_rollout_ref.rollout.engine_kwargs.sglang.max_total_tokens=2048",
    "++actor_rollout_ref.rollout.engine_kwargs.sglang.chunked_prefill_size=256",
    "++actor_rollout_ref.rollout.engine_kwargs.sglang.random_seed=0",
    "++actor_rollout_ref.rollout.engine_kwargs.sglang.sleep_on_idle=True",
    # It frees the memory of a GPU; verl turns it on, and its library is not installed here.
    "++actor_rollout_ref.rollout.engine_kwargs.sglang.enable_memory_saver=False",
)
"""What SGLang needs on a CPU; verl hands it to SGLang's ServerArgs."""


def run_verl_sglang(
    work: Path,
    overrides: Sequence[str],
    *,
    model: Path,
    plugin: bool,
    timeout: float = 420,
    env: Mapping[str, str] | None = None,
    digits: tuple[int, int] = FAMILIAR_DIGITS,
    version: str = OLDEST,
) -> VerlRun:
    """Run three steps of verl.trainer.main_ppo with SGLang of a version; the other arguments are those of run_verl."""
    assert PYTHON.exists(), f"{PYTHON} is missing: run `make setup`"
    work.mkdir(parents=True, exist_ok=True)
    data = write_prompts(work / "prompts.parquet", 3 * PROMPTS, digits)
    script = (str(PYTHON), "-m", "verl.trainer.main_ppo")
    command = [*script, *cpu_paths(work, data, model), *DEVICE, *GRPO, *SGLANG, *overrides, *logging(overrides)]
    return run_command(work, command, timeout=timeout, env={**sglang_environment(work, plugin, version), **(env or {})})


def sglang_environment(work: Path, plugin: bool, version: str) -> dict[str, str]:
    """Return what a run with SGLang needs in its environment besides, or otherwise than, a run with vLLM."""
    return {
        "PYTHONPATH": os.pathsep.join([environment(version, work)["PYTHONPATH"], str(ROOT)]),
        "VERL_USE_EXTERNAL_MODULES": "tests.peers.verl.cpu.platform,tests.peers.verl.cpu.sglang_cpu",
        "VERL_USE_EXTERNAL_PLUGINS": "auto" if plugin else "none",
        "SGLANG_USE_CPU_ENGINE": "1",
        "KERNEL_STUB_LOG": str(work / "kernel-stub.log"),
    }
