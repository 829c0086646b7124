"""What verl starts its rollout server with, taken from its own code, beside what the doctor reads off the same overrides."""

from __future__ import annotations

import tests.peers.verl.in_process  # noqa: F401  # isort: skip

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.arithmetic.shipped import FOLDER

OVERRIDES = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.dtype=float16",
    "actor_rollout_ref.rollout.temperature=0.9",
    "actor_rollout_ref.rollout.top_p=0.95",
    "actor_rollout_ref.rollout.top_k=8",
    "actor_rollout_ref.rollout.max_model_len=96",
    "actor_rollout_ref.rollout.max_num_seqs=17",
    "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.quantization=fp8",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8_e4m3",
    "+actor_rollout_ref.model.override_config.rms_norm_eps=0.002",
    "data.train_files=/nowhere/train.parquet",
    "data.max_response_length=64",
)
BLOCK = (
    "actor_rollout_ref.rollout.quantization=null",
    "+mismatch.precision={dtype:float16,engine_kv_cache:fp8_e4m3}",
    "+mismatch.routing.mode=R3",
)


class Stopped(Exception):
    """The host has said what it came for."""


def verl_passes(out: str) -> dict[str, Any]:
    """Return what verl's server gives the command line of vLLM, and the run that the doctor reads."""
    from tests.peers.verl.cpu.assets import write_vllm_stub

    sys.path.insert(0, str(write_vllm_stub(Path(out), "0.30.0")))
    from mismatch_ext.adapters.doctor.sides import Run
    from mismatch_ext.adapters.doctor.verl_command import composed
    from mismatch_ext.adapters.doctor.verl_run import read_verl
    from mismatch_ext.adapters.transformers.doctor.models import load_model
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    overrides = [*OVERRIDES, f"actor_rollout_ref.model.path={FOLDER / 'dense'}"]
    config = composed(overrides)
    server = vLLMHttpServer.__new__(vLLMHttpServer)  # its constructor asks Ray for addresses
    server.config = server._init_config(config.actor_rollout_ref.rollout)
    server.model_config = server._init_model_config(config.actor_rollout_ref.model)
    server._validate_configs()
    server.node_rank = server.replica_rank = 0
    server.nnodes = server.gpus_per_node = 1
    server.workers, server._disaggregation_role = [], "null"
    server._should_profile = lambda: False
    passed: dict[str, Any] = {}

    async def record(arguments: Any) -> None:
        passed.update(vars(arguments))

    server.run_server = record
    asyncio.run(server.launch_server())

    found = read_verl(overrides)
    return {
        "passed": {name: value for name, value in passed.items() if isinstance(value, str | int | float | None)},
        "override": server.model_config.hf_config.rms_norm_eps,
        "trainer": load_model(found.sides["model"], config=found.sides["trainer_config"]).config.rms_norm_eps,
        "requests": _sampled_with(server.config) | {"ignore_eos": server.config.ignore_eos},
        "read": {**asdict(found), "run": asdict(Run(**found.sides))},
        "block": asdict(Run(**read_verl([*overrides, *BLOCK]).sides)),
    }


def _sampled_with(rollout: Any) -> dict[str, Any]:
    """Return what verl's agent loop asks of its server for a prompt of training."""
    import numpy as np
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    worker = AgentLoopWorker.__new__(AgentLoopWorker)  # its constructor starts from Ray's handles
    worker.rollout_config = rollout
    asked: list[dict[str, Any]] = []

    async def record(sampling: dict[str, Any], *_: Any, **__: Any) -> None:
        asked.append(sampling)
        raise Stopped

    worker._run_agent_loop = record
    batch = DataProto(non_tensor_batch={"raw_prompt": np.array([[{"content": "1+1="}]], dtype=object)})
    try:
        asyncio.run(worker.generate_sequences(batch))
    except Stopped:
        pass
    return asked[0]
