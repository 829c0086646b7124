"""What this package relies on in TRL, and what it refuses by name."""

from __future__ import annotations

from mismatch_ext.seams import Refusal, Seam, exists

_ENGINE = "trl.generation.vllm_generation"
_CLIENT = "trl.generation.vllm_client:VLLMClient"
_SOURCE = "https://github.com/huggingface/trl/blob/v1.16.0/trl/"
_TRAINER = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/trainer.py"

# By name, the first arguments of the methods that `MismatchTrainerMixin` overrides.
OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "create_accelerator_and_postprocess": (),
    "_generate_and_score_completions": ("inputs",),
    "_generate": (),
    "_get_per_token_logps_and_entropies": ("model",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
    "_get_grad_norm": (),
    "_get_learning_rate": (),
    "train": ("resume_from_checkpoint",),
    "log": ("logs",),
    "evaluate": ("eval_dataset", "ignore_keys", "metric_key_prefix"),
    "_save_checkpoint": ("model", "trial"),
}


def _trainer(name: str, module: str) -> Seam:
    """Return what ours override in a trainer of TRL's."""
    return Seam(
        name=f"trl/{module}",
        features=("monitor",),
        what="the methods that MismatchTrainerMixin overrides",
        claims=tuple(exists(f"trl.trainer.{module}:{name}.{method}", *first) for method, first in OVERRIDDEN.items()),
        checked="an optimizer step whose losses did not come through ours is refused",
        upstream=f"{_SOURCE}trainer/{module}.py",
        where=(name,),
    )


SEAMS = (
    _trainer("GRPOTrainer", "grpo_trainer"),
    _trainer("RLOOTrainer", "rloo_trainer"),
    Seam(
        name="trl/colocated_engine",
        features=("monitor",),
        what="starting TRL's engine as asked, verifying each weight update, and keeping each rollout",
        claims=(
            exists(f"{_ENGINE}:VLLMGeneration.generate", "prompts"),
            exists(f"{_ENGINE}:VLLMGeneration.sync_weights"),
            exists(f"{_ENGINE}:VLLMGeneration._iter_named_params"),
            exists(f"{_ENGINE}:LLM"),
        ),
        checked="dtypes are read back from the engine, and probe tokens are scored after each update",
        upstream=_SOURCE + "generation/vllm_generation.py",
        where=("vllm",),
    ),
    Seam(
        name="trl/server_client",
        features=("monitor",),
        what="asking a vLLM server, naming each weight update, and keeping the routes of its answers",
        claims=(
            exists(f"{_CLIENT}._get", "url"),
            exists(f"{_CLIENT}._post", "url"),
            exists(f"{_CLIENT}.init_communicator", "device"),
            exists(f"{_CLIENT}.update_named_params", "metadata", "named_params"),
            exists(f"{_CLIENT}._start_weight_update"),
            exists(f"{_CLIENT}._finish_weight_update"),
            exists(f"{_CLIENT}.reset_prefix_cache"),
        ),
        checked="each update's name is read back from the server",
        upstream=_SOURCE + "generation/vllm_client.py",
        where=("vllm", "server"),
    ),
    Seam(
        name="trl/fused_head",
        features=("sampling_mask",),
        what="log-probabilities over sampling masks, from what the fused output projection takes",
        claims=(exists("trl.trainer.utils:add_fused_lm_head"), exists("trl.trainer.utils:_ChunkedLogProbFunction")),
        checked="the patch's probe computes a small head, and a batch that is scored elsewhere is refused",
        upstream=_SOURCE + "trainer/utils.py",
        where=("GRPOTrainer",),
    ),
    Seam(
        name="transformers/accelerator_options",
        features=("monitor",),
        what="refusing a trainer that would ignore the block",
        claims=(exists("transformers.trainer_pt_utils:AcceleratorConfig.to_dict"),),
        checked="the options of an accelerator are given to our trainers alone",
        upstream=_TRAINER,
    ),
    Seam(
        name="transformers/learning_rate",
        features=("lr",),
        what="leading the rate, which holds during the optimizer's step",
        claims=(
            exists("transformers.trainer_callback:TrainerCallback.on_pre_optimizer_step"),
            exists("transformers.trainer_callback:TrainerCallback.on_optimizer_step"),
        ),
        checked="the rate that is logged is read off the optimizer during its step",
        upstream=_TRAINER,
    ),
    Seam(
        name="accelerate/scaler",
        features=("precision",),
        what="float16 with a loss scaler that is on",
        claims=(exists("accelerate.accelerator:Accelerator.autocast"),),
        checked="the scaler and the autocast dtype are read back before the first step",
        upstream="https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py",
    ),
)

_NO_SEAM = "the trainer's loss is not known to have a place for it. Use GRPOTrainer."
_NO_CUT = "a server's answers have no number for what was cut off. Set vllm_mode='colocate'."
_NO_ENGINE = "generation by transformers reports no rollout log-probabilities. Set use_vllm=True."

REFUSALS = (
    *(Refusal(("RLOOTrainer",), name, _NO_SEAM) for name in ("kl", "correction", "sampling_mask")),
    Refusal(("GRPOTrainer", "server"), "sampling_mask", _NO_CUT),
    *(
        Refusal(("GRPOTrainer", "alone"), name, _NO_ENGINE)
        for name in ("precision", "correction", "sampling_mask", "routing.R3", "monitor.weight_sync")
    ),
)  # fmt: skip
