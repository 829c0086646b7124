"""What this package relies on in verl: the classes that it derives from, and what it calls."""

from __future__ import annotations

from mismatch_ext.seams import Claim, Seam, exists

_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/"
_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_LOOPS = "verl.experimental.agent_loop.agent_loop"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_FSDP = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
_MEGATRON = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
_WORKERS = "verl.workers.engine_workers"
_SEPARATE = "verl.trainer.ppo.v1.trainer_separate_async"
_SGLANG = "verl.workers.rollout.sglang_rollout.async_sglang_server"
_BATCH = ("batch", "metrics")


def _members(host: str, **params: tuple[str, ...]) -> tuple[Claim, ...]:
    """Claim methods and properties that our classes override or call: nobody would call an override of a name that is gone."""
    return tuple(exists(f"{host}.{name}", *first) for name, first in params.items())


SEAMS = (
    Seam(
        name="verl/configuration",
        features=("monitor",),
        what="reading the block before Ray starts",
        claims=(
            exists("verl.utils.config:validate_config", "config"),
            exists("verl.trainer.constants_ppo:get_ppo_ray_runtime_env", "config"),
        ),
        checked="the guard ends a run whose block was not read, and a worker without a block is an error",
        upstream=_SOURCE + "trainer/main_ppo.py",
        where=("verl",),
    ),
    Seam(
        name="verl/workers",
        features=("monitor",),
        what="measuring and proving in the processes of trainer and engine",
        claims=(
            *_members(
                f"{_WORKERS}:ActorRolloutRefWorker",
                init_model=(),
                compute_log_prob=("data",),
                update_weights=("global_steps", "mode"),
            ),
            exists(f"{_WORKERS}:TrainingWorker.set_loss_fn", "loss_fn"),
            exists("verl.workers.engine.base:BaseEngine.eval_mode"),
            exists("verl.workers.engine.base:EngineRegistry._engines"),
            exists("verl.workers.config.rollout:RolloutConfig.custom"),
        ),
        checked="each process reports its classes and dtypes, and probe tokens are scored after each update",
        upstream=_SOURCE + "workers/engine_workers.py",
        where=("verl",),
    ),
    Seam(
        name="verl/fsdp_engine",
        features=("monitor",),
        what="passes, steps and checkpoints of the FSDP engine",
        claims=_members(
            _FSDP,
            initialize=(),
            _build_fsdp_module=("module",),
            forward_backward_batch=("data", "loss_function", "forward_only"),
            forward_step=("micro_batch", "loss_function", "forward_only"),
            prepare_model_inputs=("micro_batch",),
            prepare_model_outputs=("output", "output_args", "micro_batch"),
            optimizer_step=(),
            lr_scheduler_step=(),
            get_per_tensor_param=(),
            disable_adapter=(),
            save_checkpoint=("local_path",),
            load_checkpoint=("local_path",),
        ),
        checked="each worker refuses an actor's engine of another class before the first step",
        upstream=_SOURCE + "workers/engine/fsdp/transformer_impl.py",
        where=("verl", "fsdp"),
    ),
    Seam(
        name="verl/megatron_engine",
        features=("monitor",),
        what="steps and checkpoints of the Megatron engine",
        claims=_members(
            _MEGATRON,
            initialize=(),
            forward_backward_batch=("data", "loss_function", "forward_only"),
            optimizer_step=(),
            lr_scheduler_step=(),
            save_checkpoint=("local_path",),
            load_checkpoint=("local_path",),
        ),
        checked="each worker refuses an actor's engine of another class before the first step",
        upstream=_SOURCE + "workers/engine/megatron/transformer_impl.py",
        where=("verl", "megatron"),
    ),
    Seam(
        name="verl/sglang_server",
        features=("monitor",),
        what="looking at each answer of SGLang",
        claims=(
            *_members(f"{_SGLANG}:SGLangHttpServer", launch_server=(), generate=("prompt_ids", "sampling_params")),
            exists("verl.workers.rollout.replica:RolloutReplicaRegistry.register", "name", "loader"),
        ),
        checked="the server reports its settings before the first step",
        upstream=_SOURCE + "workers/rollout/sglang_rollout/async_sglang_server.py",
        where=("verl", "sglang"),
    ),
    Seam(
        name="verl/trainer_modes",
        features=("monitor",),
        what="taking the place of the trainer of each mode",
        claims=(
            exists(f"{_TRAINER}:register_trainer", "name"),
            exists(f"{_TRAINER}:get_trainer_cls", "name"),
            *_members(
                f"{_TRAINER}:PPOTrainer",
                init=(),
                fit=("agent_loop_manager",),
                _init_resource_pool_mgr=(),
                on_init_end=(),
                on_step_end=(),
                on_validate_end=(),
                step=("metrics", "timing_raw"),
                _step_once=("metrics", "timing_raw", "sample_batch_size"),
                _compute_old_log_prob=_BATCH,
                _compute_ref_log_prob=_BATCH,
                _compute_values=_BATCH,
                _compute_advantage=_BATCH,
                _update_critic=_BATCH,
                _update_actor=_BATCH,
                _compute_metrics=(*_BATCH, "timing_raw", "global_steps", "epoch"),
                _save_checkpoint=(),
                _load_checkpoint=(),
            ),
            exists("verl.checkpoint_engine.base:CheckpointEngineManager.add_replicas", "replicas"),
            exists("verl.checkpoint_engine.base:CheckpointEngineManager.remove_replicas", "replicas"),
            exists("verl.checkpoint_engine.base:CheckpointEngineManager.abort_replicas"),
            exists("verl.checkpoint_engine.base:CheckpointEngineManager.sleep_replicas"),
        ),
        checked="a run does not start Ray with a trainer mode that is not ours",
        upstream=_SOURCE + "trainer/ppo/v1/trainer_base.py",
        where=("verl",),
    ),
    Seam(
        name="verl/separate_async",
        features=("monitor",),
        what="π_old of the updates between two weight updates",
        claims=(
            exists("verl.experimental.separation.engine_workers:DetachActorWorker.copy_handler"),
            exists(f"{_SEPARATE}:logger"),
        ),
        checked="by the claims alone: an override that nobody calls would leave π_old the present policy",
        upstream=_SOURCE + "experimental/separation/engine_workers.py",
        where=("verl", "separate_async"),
    ),
    Seam(
        name="verl/parts",
        features=("monitor",),
        what="measuring a batch in chunks of rows, and sending a pass the fields that it needs",
        claims=(
            exists("verl.workers.utils.padding:response_from_nested", "tensor", "response_mask"),
            exists("transfer_queue:get_client"),
            exists("transfer_queue.client:TransferQueueClient.kv_retrieve_meta", "keys", "partition_id"),
            exists("transfer_queue:kv_batch_get", "keys", "partition_id", "select_fields"),
            exists("transfer_queue:kv_batch_put", "keys", "partition_id", "fields"),
        ),
        checked="lengths and log-probabilities of each chunk are checked before they are summed",
        upstream=_SOURCE + "workers/utils/padding.py",
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
            exists("verl.trainer.ppo.metric_utils:RolloutMoELoadBalanceMetricsAccumulator.update", "routed_experts"),
        ),
        checked="a token without a version counts as unknown, and never as one of the present weights; routes without "
        "a digest of their tokens are refused",
        upstream=_SOURCE + "workers/rollout/llm_server.py",
        where=("verl",),
    ),
    Seam(
        name="verl/sampling_masks",
        features=("sampling_mask",),
        what="masks from vLLM's answers to the log-probabilities of the trainer's passes",
        claims=(
            *_members(
                f"{_SERVER}:vLLMHttpServer", launch_server=(), generate=("prompt_ids", "sampling_params", "request_id")
            ),
            exists(f"{_LOOPS}:AgentLoopWorker._agent_loop_postprocess", "output", "validate"),
            exists(f"{_LOOPS}:AgentLoopWorker._run_agent_loop"),
            exists(f"{_LOOPS}:AgentLoopOutput.as_dict"),
            exists("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ"),
        ),
        checked="each pass compares a token with verl's own score, and samples that no pass has scored are refused",
        upstream=_SOURCE + "workers/rollout/vllm_rollout/vllm_async_server.py",
        where=("verl", "fsdp", "vllm"),
    ),
)
