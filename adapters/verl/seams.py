"""What this package relies on in verl beside its version: the classes that it derives from, and what it refuses by name."""

from __future__ import annotations

from mismatch_ext.seams import Refusal, Seam, exists

_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/"
_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_LOOPS = "verl.experimental.agent_loop.agent_loop"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_FSDP = "verl.workers.engine.fsdp.transformer_impl"

SEAMS = (
    Seam(
        name="verl/configuration",
        features=("monitor",),
        what="reading the block before Ray starts",
        claims=(
            exists("verl.utils.config:validate_config", "config"),
            exists("verl.trainer.constants_ppo:get_ppo_ray_runtime_env", "config"),
        ),
        checked="each process reports the block that it has, before the first step",
        upstream=_SOURCE + "trainer/main_ppo.py",
        where=("verl",),
    ),
    Seam(
        name="verl/workers",
        features=("monitor",),
        what="measuring and proving in the processes of trainer and engine",
        claims=(
            exists("verl.workers.engine_workers:ActorRolloutRefWorker.compute_log_prob", "data"),
            exists("verl.workers.engine_workers:TrainingWorker"),
            exists(f"{_FSDP}:FSDPEngineWithLMHead"),
            exists("verl.workers.engine.base:BaseEngine.get_data_parallel_rank"),
            exists("verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension.update_weights_from_ipc"),
        ),
        checked="each process reports its classes and dtypes, and probe tokens are scored after each update",
        upstream=_SOURCE + "workers/engine_workers.py",
        where=("verl",),
    ),
    Seam(
        name="verl/trainer_modes",
        features=("monitor",),
        what="taking the place of the trainer of each mode",
        claims=(
            exists(f"{_TRAINER}:register_trainer", "name"),
            exists(f"{_TRAINER}:get_trainer_cls", "name"),
            exists(f"{_TRAINER}:PPOTrainer._step_once", "metrics", "timing_raw", "sample_batch_size"),
            exists(f"{_TRAINER}:PPOTrainer._setup"),
            exists("verl.checkpoint_engine.base:CheckpointEngineManager.abort_replicas"),
        ),
        checked="a run does not start Ray with a trainer mode that is not ours",
        upstream=_SOURCE + "trainer/ppo/v1/trainer_base.py",
        where=("verl",),
    ),
    Seam(
        name="verl/parts",
        features=("monitor",),
        what="measuring each rank's part of a batch where it lies, and sending a pass the fields that it needs",
        claims=(
            exists("verl.workers.utils.padding:response_from_nested", "tensor", "response_mask"),
            exists("verl.utils.transferqueue_utils:async_kv_batch_meta2batch_meta", "meta"),
            exists("transfer_queue:kv_batch_get", "keys", "partition_id", "select_fields"),
            exists("transfer_queue:kv_batch_put", "keys", "partition_id", "fields"),
        ),
        checked="the tokens and log-probabilities of each part are checked before they are summed",
        upstream=_SOURCE + "utils/transferqueue_utils.py",
        where=("verl",),
    ),
    Seam(
        name="verl/weight_versions",
        features=("monitor",),
        what="which weights and experts sampled each token of a rollout",
        claims=(
            exists("verl.workers.rollout.llm_server:LLMServerClient.generate", "request_id"),
            exists("verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate", "request_id"),
            exists("verl.workers.rollout.replica:TokenOutput.routed_experts"),
            exists(f"{_TRAINER}:PPOTrainer.get_llm_client"),
        ),
        checked="a token without a version counts as unknown, and never as one of the present weights",
        upstream=_SOURCE + "workers/rollout/llm_server.py",
        where=("verl",),
    ),
    Seam(
        name="verl/sampling_masks",
        features=("sampling_mask",),
        what="masks from vLLM's answers to the log-probabilities of the trainer's passes",
        claims=(
            exists(f"{_SERVER}:vLLMHttpServer.generate", "prompt_ids", "sampling_params", "request_id"),
            exists(f"{_LOOPS}:AgentLoopWorker._agent_loop_postprocess", "output", "validate"),
            exists(f"{_LOOPS}:AgentLoopWorker._run_agent_loop"),
            exists(f"{_LOOPS}:AgentLoopOutput.as_dict"),
            exists("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ"),
            exists(f"{_FSDP}:FSDPEngineWithLMHead.prepare_model_outputs"),
        ),
        checked="the patch's probe computes two tokens, and a micro-batch that is scored elsewhere is refused",
        upstream=_SOURCE + "workers/rollout/vllm_rollout/vllm_async_server.py",
        where=("verl", "fsdp", "vllm"),
    ),
)

REFUSALS = (
    Refusal(
        ("verl",), "monitor.doctor", "no batch is examined in a run of verl",
        "none. Give the checkpoint or a logged rollout to `mismatch-ext doctor --verl`",
    ),
    Refusal(("verl", "sglang"), "sampling_mask", "masks are read off vLLM's answers alone", "vLLM"),
    Refusal(("verl", "megatron"), "sampling_mask", "masks are replayed in verl's FSDP engine alone", "fsdp or fsdp2"),
    Refusal(
        ("verl", "megatron"), "precision", "dtypes and loss scale of verl's Megatron engine are set elsewhere", "fsdp2"
    ),
    Refusal(("verl", "megatron"), "monitor.weight_sync", "the actor's weights are probed in FSDP2 models alone", "'off'"),
)  # fmt: skip
