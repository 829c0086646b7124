"""What this package relies on in verl beside its version: the symbols that it patches, and the classes that it derives from."""

from __future__ import annotations

from mismatch_ext.patches.verl.megatron_replay import CLOSED_TOPK, REPLAYED_BATCH

from mismatch_ext.compat import Has, Known, Says, Seam, Takes
from mismatch_ext.patching import Patch

_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/"
_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_LOOPS = "verl.experimental.agent_loop.agent_loop"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_FSDP = "verl.workers.engine.fsdp.transformer_impl"


def _known(patch: Patch) -> Known:
    """Return the claim that a patch's digests make."""
    return Known(patch.target, dict.fromkeys(patch.texts, "0.9.1"))


SEAMS = (
    Seam(
        name="verl/configuration",
        peer="verl",
        features=("monitor",),
        what="reading the block before Ray starts",
        claims=(
            Takes("verl.utils.config:validate_config", "config", first=True),
            Takes("verl.trainer.constants_ppo:get_ppo_ray_runtime_env", "config", first=True),
        ),
        upstream=_SOURCE + "trainer/main_ppo.py",
        where=("verl",),
    ),
    Seam(
        name="verl/workers",
        peer="verl",
        features=("monitor",),
        what="measuring and proving in the processes of trainer and engine",
        claims=(
            Has("verl.workers.engine_workers:ActorRolloutRefWorker"),
            Has("verl.workers.engine_workers:TrainingWorker"),
            Has("verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"),
            *(
                Has(f"verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension{name}")
                for name in ("", ".update_weights_from_ipc", "._update_weights", "._iter_all_models_with_config")
            ),
        ),
        upstream=_SOURCE + "workers/engine_workers.py",
        where=("verl",),
    ),
    Seam(
        name="verl/trainer_modes",
        peer="verl",
        features=("monitor",),
        what="taking the place of the trainer of each mode, and of the worker that puts weights aside",
        claims=(
            Takes(f"{_TRAINER}:register_trainer", "name", first=True),
            Takes(f"{_TRAINER}:get_trainer_cls", "name", first=True),
            Takes(f"{_TRAINER}:PPOTrainer._step_once", "sample_batch_size"),
            Has(f"{_TRAINER}:PPOTrainer._rollout_server_managers"),
            Has(f"{_TRAINER}:PPOTrainer._setup"),
            Has("verl.trainer.ppo.v1.trainer_separate_async:logger"),
            Has("verl.checkpoint_engine.base:CheckpointEngineManager.abort_replicas"),
            Has("verl.experimental.separation.engine_workers:DetachActorWorker.copy_handler"),
        ),
        upstream=_SOURCE + "trainer/ppo/v1/trainer_base.py",
        where=("verl",),
    ),
    Seam(
        name="verl/parts",
        peer="verl",
        features=("monitor",),
        what="measuring each rank's part of a batch where it lies, and sending a pass the fields that it needs",
        claims=(
            Takes("verl.workers.engine_workers:ActorRolloutRefWorker.compute_log_prob", "data"),
            Takes("verl.workers.utils.padding:response_from_nested", "tensor", "response_mask", first=True),
            Takes("verl.utils.transferqueue_utils:async_kv_batch_meta2batch_meta", "meta", first=True),
            Takes("transfer_queue:kv_batch_get", "keys", "partition_id", "select_fields"),
            Takes("transfer_queue:kv_batch_put", "keys", "partition_id", "fields"),
            Takes("transfer_queue.client:TransferQueueClient.kv_retrieve_meta", "keys", "partition_id"),
            Has("verl.workers.engine.base:BaseEngine.get_data_parallel_rank"),
        ),
        upstream=_SOURCE + "utils/transferqueue_utils.py",
        where=("verl",),
    ),
    Seam(
        name="verl/weight_versions",
        peer="verl",
        features=("monitor",),
        what="which weights and experts sampled each token of a rollout",
        claims=(
            Takes("verl.workers.rollout.llm_server:LLMServerClient.generate", "request_id", "prompt_ids"),
            Takes("verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate", "request_id", "prompt_ids"),
            Has("verl.workers.rollout.replica:TokenOutput.routed_experts"),
            Has(f"{_TRAINER}:PPOTrainer.get_llm_client"),
        ),
        upstream=_SOURCE + "workers/rollout/llm_server.py",
        where=("verl",),
    ),
    Seam(
        name="verl/sampling_masks",
        peer="verl",
        features=("sampling_mask",),
        what="masks from vLLM's answers to the log-probabilities of the trainer's passes",
        claims=(
            Takes(f"{_SERVER}:vLLMHttpServer.generate", "prompt_ids", "sampling_params", "request_id"),
            Says(f"{_SERVER}:vLLMHttpServer.generate", r"self\.engine\.generate\("),
            Says(f"{_SERVER}:vLLMReplica.__init__", r"self\.server_class = "),
            Takes(f"{_LOOPS}:AgentLoopWorker._agent_loop_postprocess", "output", "validate"),
            Has(f"{_LOOPS}:AgentLoopWorker._run_agent_loop"),
            Has("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ"),
            Has(f"{_LOOPS}:AgentLoopOutput.as_dict"),
            Says(f"{_FSDP}:FSDPEngineWithLMHead.prepare_model_outputs", r"logprobs_from_logits\("),
            Takes(f"{_FSDP}:logprobs_from_logits", "logits", "labels", "inplace_backward", first=True),
        ),
        upstream=_SOURCE + "workers/rollout/vllm_rollout/vllm_async_server.py",
        where=("verl", "fsdp", "vllm"),
    ),
    Seam(
        name="verl/kl_in_rewards",
        peer="verl",
        features=("kl",),
        what="the KL penalty among the rewards",
        claims=(Has(f"{_TRAINER}:apply_kl_penalty"),),
        upstream=_SOURCE + "trainer/ppo/v1/trainer_base.py",
        where=("verl",),
    ),
    Seam(
        name="verl/megatron_replay",
        peer="verl",
        features=("routing",),
        what="refusing routes that are none, and routers that choose for themselves",
        claims=(_known(REPLAYED_BATCH), _known(CLOSED_TOPK)),
        upstream=_SOURCE + "utils/megatron/router_replay_patch.py",
        where=("verl", "megatron"),
    ),
)
