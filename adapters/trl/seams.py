"""The places that this package relies on in TRL, and in transformers' Trainer, which TRL's trainers derive from."""

from __future__ import annotations

from mismatch_ext.compat import Both, Either, Has, Known, Says, Seam, Takes

_GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
_RLOO = "trl.trainer.rloo_trainer:RLOOTrainer"
_ENGINE = "trl.generation.vllm_generation:VLLMGeneration"
_CLIENT = "trl.generation.vllm_client:VLLMClient"
_ASYNC = "trl.experimental.async_grpo.async_grpo_trainer"
_ASYNC_TRAINER = f"{_ASYNC}:AsyncGRPOTrainer"
_LOOP = "trl.experimental.async_grpo.async_rollout_worker:_AsyncRolloutLoop"
_WORKER = "trl.experimental.async_grpo.async_rollout_worker:AsyncRolloutWorker"
_TREE = "trl.experimental.async_grpo.packing:TreeRow"
_SOURCE = "https://github.com/huggingface/trl/blob/v1.16.0/trl/"
_TRAINER = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/trainer.py"
_BASE = "transformers.trainer:Trainer"
_SCORED = ("self", "model", "input_ids", "attention_mask", "logits_to_keep")
_IN_OBJECTIVE = ("kl", "correction", "routing", "sampling_mask")

# AsyncGRPOTrainer's loss is called in two halves, which nothing at run time could see a change in.
_ASYNC_LOSS = {"cab9828fb33a6556": "1.16.0"}


def _trainer(name: str, target: str, file: str, keys: tuple[str, ...]) -> tuple[Seam, ...]:
    """Return the seams of what is overridden in one of TRL's trainers, whatever the block asks for."""
    batch, scoring = f"{target}._generate_and_score_completions", f"{target}._get_per_token_logps_and_entropies"
    return (
        Seam(
            name=f"trl/{name}_batch",
            peer="trl",
            features=("monitor",),
            what="measuring each batch that was sampled",
            claims=(Takes(batch, "self", "inputs", first=True), *(Says(batch, f'"{key}"') for key in keys)),
            upstream=_SOURCE + file,
            where=(target.rpartition(":")[2],),
        ),
        Seam(
            name=f"trl/{name}_scoring",
            peer="trl",
            features=("monitor",),
            what="the trainer's log-probabilities of sampled tokens",
            claims=(
                Either(
                    Takes(scoring, *_SCORED, "batch_size", first=True),
                    # 1.14 hands on what it is given.
                    Both(
                        Takes(scoring, "self", "model", first=True),
                        Takes(f"{target}._full_logits_logps", *_SCORED, first=True),
                    ),
                ),
            ),
            upstream=_SOURCE + file,
            where=(target.rpartition(":")[2],),
        ),
        Seam(
            name=f"trl/{name}_construction",
            peer="trl",
            features=("monitor",),
            what="building the trainer with its engine, and logging",
            claims=(
                Takes(f"{target}.__init__", "self", "model", "reward_funcs", "args", first=True),
                Takes(f"{target}.log", "self", "logs", "start_time"),
                Has(f"{target}._metrics"),
            ),
            upstream=_SOURCE + file,
            where=(target.rpartition(":")[2],),
        ),
        Seam(
            name=f"trl/{name}_generate",
            peer="trl",
            features=("kl", "routing"),
            what="knowing which completions are being scored and rewarded",
            claims=(Takes(f"{target}._generate", "self", "prompts", first=True),),
            upstream=_SOURCE + file,
            where=(target.rpartition(":")[2],),
        ),
    )


def _objective(name: str, target: str, file: str) -> tuple[Seam, ...]:
    """Return the seams of methods that sections of the objective wrap; `behavior.check_loss` shows what the loss computes."""
    shared = {"peer": "trl", "upstream": _SOURCE + file, "where": (target.rpartition(":")[2],)}
    rewarded = ("inputs", "prompts", "completions", "completion_ids_list")
    return (
        Seam(
            name=f"trl/{name}_own_loss",
            features=_IN_OBJECTIVE,
            what="the loss that terms are added to and routes are replayed in",
            claims=(Takes(f"{target}._compute_loss", "self", "model", "inputs", first=True),),
            **shared,  # type: ignore[arg-type]
        ),
        Seam(
            name=f"trl/{name}_rewards",
            features=("kl",),
            what="the KL penalty among the rewards",
            claims=(Takes(f"{target}._calculate_rewards", "self", *rewarded, first=True),),
            **shared,  # type: ignore[arg-type]
        ),
    )


_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")

SEAMS = (
    *_trainer("grpo", _GRPO, "trainer/grpo_trainer.py", (*_KEYS, "sampling_per_token_logps", "old_per_token_logps")),
    *_trainer("rloo", _RLOO, "trainer/rloo_trainer.py", _KEYS),
    *_objective("grpo", _GRPO, "trainer/grpo_trainer.py"),
    *_objective("rloo", _RLOO, "trainer/rloo_trainer.py"),
    Seam(
        name="trl/colocated_engine",
        peer="trl",
        features=("monitor",),
        what="verifying each weight update and keeping each rollout of TRL's engine",
        claims=(
            Takes(f"{_ENGINE}.generate", "self", "prompts", first=True),
            Has(f"{_ENGINE}.sync_weights"),
            Has(f"{_ENGINE}._iter_named_params"),
            Has(f"{_ENGINE}.llm"),
            Has(f"{_ENGINE}.logprobs"),
        ),
        upstream=_SOURCE + "generation/vllm_generation.py",
        where=("vllm",),
    ),
    Seam(
        name="trl/server_client",
        peer="trl",
        features=("monitor",),
        what="asking a vLLM server, naming each weight update, and keeping the routes of its answers",
        claims=(
            Takes(f"{_CLIENT}._get", "self", "url", first=True),
            Takes(f"{_CLIENT}._post", "self", "url", first=True),
            Takes(f"{_CLIENT}.init_communicator", "self", "device", first=True),
            Takes(f"{_CLIENT}.update_named_params", "self", "metadata", "named_params", first=True),
            Has(f"{_CLIENT}._start_weight_update"),
            Has(f"{_CLIENT}._finish_weight_update"),
            Has(f"{_CLIENT}.reset_prefix_cache"),
            Says(f"{_CLIENT}.__init__", r"self\.(session|base_url|_updating_weights)\b"),
            Says(_ENGINE, r"\bVLLMClient\("),
            Has(f"{_ENGINE}.mode"),
            Has(f"{_ENGINE}.server_timeout"),
        ),
        upstream=_SOURCE + "generation/vllm_client.py",
        where=("vllm", "server"),
    ),
    Seam(
        name="trl/engine_arguments",
        peer="trl",
        features=("precision", "routing.R3", "sampling_mask"),
        what="giving the engine a dtype, the flag that records routes, and the number of log-probabilities",
        claims=(Says(_ENGINE, r"\bLLM\("), Says("trl.generation.vllm_generation", r"import .*\bLLM\b")),
        upstream="https://github.com/huggingface/trl/pull/6774",
        where=("vllm",),
    ),
    Seam(
        name="trl/turns",
        peer="trl",
        features=("monitor",),
        what="holding a completion of several generations to the records of each",
        claims=(
            Takes(f"{_GRPO}._generate", "self", "prompts", first=True),
            Says(f"{_GRPO}._generate", r"return prompt_ids, completion_ids, tool_mask, completions, logprobs\b"),
            Says(f"{_GRPO}.__init__", r"self\.tools = "),
            Says(f"{_GRPO}._generate", r"self\.rollout_func\(prompts, self\)"),
            Says(f"{_GRPO}._generate", r'"env_mask"'),
        ),
        upstream=_SOURCE + "trainer/grpo_trainer.py",
        where=("GRPOTrainer", "vllm", "tools"),
    ),
    Seam(
        name="trl/fused_head",
        peer="trl",
        features=("sampling_mask",),
        what="log-probabilities over sampling masks, from what the fused output projection takes",
        claims=(
            Says("trl.trainer.utils:add_fused_lm_head", r"_ChunkedLogProbFunction\.apply\("),
            Says("trl.trainer.utils", r"import ChunkedLogProbFunction as _ChunkedLogProbFunction"),
            Takes(
                "trl.kernels.chunked_logprob:ChunkedLogProbFunction.forward",
                "ctx",
                "hidden",
                "weight",
                "bias",
                "targets",
                "temperature",
                "chunk_size",
                "final_logit_softcapping",
                "logit_scale",
                "outputs",
                first=True,
            ),
            Says("trl.generation.vllm_generation:extract_logprobs", r"\.rank"),
        ),
        upstream=_SOURCE + "trainer/utils.py",
        where=("GRPOTrainer",),
    ),
    Seam(
        name="trl/async_rollouts",
        peer="trl",
        features=("monitor",),
        what="the version of the weights of each token, from the request that sampled it to the collator",
        claims=(
            Has(f"{_WORKER}._loop_cls"),
            Takes(f"{_WORKER}.check_health", "self", "stale_after_s"),
            Takes(f"{_WORKER}.stop", "self"),
            Says(f"{_WORKER}.stop", r"self\._process\._popen\b"),
            Says(f"{_WORKER}.check_health", r"self\._failed_event\.is_set\("),
            Says(f"{_WORKER}.__init__", r"self\.(_mp_ctx|_loop_kwargs)\b"),
            Takes(f"{_LOOP}._post", "self", "path", "payload", "timeout", "max_retries", first=True),
            Takes(f"{_LOOP}._retry", "self", "coro_factory", first=True),
            Takes(f"{_LOOP}._score_group", "self", "group", first=True),
            Says(f"{_LOOP}._score_group", r"seq\.old_log_probs"),
            Says(f"{_LOOP}._generate_one_turn", r'\["token_logprobs"\]'),
            Says(f"{_LOOP}.__init__", r"self\.(_counters|vllm_server_url|request_timeout)\b"),
            Says(f"{_ASYNC}:RolloutQueueDataset", r'"metrics": sample\.metrics'),
            Takes(f"{_TREE}.pack", "self"),
            Says(f"{_TREE}.add", r"self\.(samples|sample_nodes)\b"),
        ),
        upstream=_SOURCE + "experimental/async_grpo/async_rollout_worker.py",
        where=("AsyncGRPOTrainer",),
    ),
    Seam(
        name="trl/async_weights",
        peer="trl",
        features=("monitor",),
        what="holding requests back around each weight update, naming and verifying it",
        claims=(
            Has("trl.experimental.async_grpo.weight_transfer:WeightTransferClient.init_weight_transfer"),
            Has("trl.experimental.async_grpo.weight_transfer:WeightTransferClient.pause"),
            Takes(
                "trl.experimental.async_grpo.weight_transfer:WeightTransferClient.send_weights",
                "self",
                "iterator",
                first=True,
            ),
            Has("trl.experimental.async_grpo.weight_transfer:WeightTransferClient.resume"),
            Says(_ASYNC_TRAINER, r"self\.weight_transfer\.(pause|send_weights|resume|init_weight_transfer)\("),
            Has("trl.experimental.async_grpo.vllm_client:VLLMClient.wait_for_server_ready"),
        ),
        upstream=_SOURCE + "experimental/async_grpo/weight_transfer.py",
        where=("AsyncGRPOTrainer",),
    ),
    Seam(
        name="trl/async_loss",
        peer="trl",
        features=("monitor",),
        what="measuring, correcting and replaying routes between the forward pass and the loss",
        claims=(
            Known(f"{_ASYNC_TRAINER}.compute_loss", _ASYNC_LOSS),
            Says(f"{_ASYNC_TRAINER}.get_train_dataloader", r"self\.accelerator\.prepare\("),
            Has(f"{_ASYNC}:DataCollatorForRollout"),
            Takes(f"{_ASYNC_TRAINER}.log", "self", "logs", "start_time"),
        ),
        upstream=_SOURCE + "experimental/async_grpo/async_grpo_trainer.py",
        where=("AsyncGRPOTrainer",),
    ),
    Seam(
        name="transformers/accelerator",
        peer="transformers",
        features=("monitor",),
        what="checking the model before the engine is built, and putting in the loss scaler",
        claims=(Has(f"{_BASE}.create_accelerator_and_postprocess"),),
        upstream=_TRAINER,
    ),
    Seam(
        name="transformers/checkpoints",
        peer="transformers",
        features=("monitor",),
        what="resuming with the state that each section has",
        claims=(
            Has(f"{_BASE}._save_checkpoint"),
            Has(f"{_BASE}._load_scaler"),
        ),
        upstream=_TRAINER,
    ),
    Seam(
        name="transformers/training_step",
        peer="transformers",
        features=_IN_OBJECTIVE,
        what="proving that what was changed is the loss that is stepped",
        claims=(
            Takes(f"{_BASE}.training_step", "self", "model", "inputs", first=True),
            Takes(f"{_BASE}.compute_loss", "self", "model", "inputs", first=True),
        ),
        upstream=_TRAINER,
    ),
    Seam(
        name="transformers/learning_rate",
        peer="transformers",
        features=("lr",),
        what="leading the rate by the gradient norm, and logging the rate that is applied",
        claims=(
            Takes(f"{_BASE}._get_grad_norm", "self", "model", "grad_norm"),
            Has(f"{_BASE}._get_learning_rate"),
            Has("transformers.trainer_callback:TrainerCallback.on_pre_optimizer_step"),
            Has("transformers.trainer_callback:TrainerCallback.on_optimizer_step"),
        ),
        upstream=_TRAINER,
    ),
    Seam(
        name="accelerate/scaler",
        peer="accelerate",
        features=("precision",),
        what="float16 with a loss scaler that is on",
        claims=(
            Has("accelerate.accelerator:Accelerator.scaler"),
            Has("accelerate.accelerator:Accelerator.native_amp"),
            Has("accelerate.accelerator:Accelerator.autocast"),
        ),
        upstream="https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py",
    ),
)
