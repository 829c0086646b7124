"""Changes to verl as a later release may have them."""

from __future__ import annotations

from tests.peers.trl.copies import Change, documented, replaced, together, with_argument

ENGINE, LOSS, ALGOS = (
    "verl/workers/engine/fsdp/transformer_impl.py",
    "verl/workers/utils/losses.py",
    "verl/trainer/ppo/core_algos.py",
)
TOUCHED = {
    ENGINE: (
        "initialize", "_build_fsdp_module", "forward_backward_batch", "forward_step", "prepare_model_inputs",
        "prepare_model_outputs", "optimizer_step", "lr_scheduler_step", "get_per_tensor_param", "save_checkpoint",
        "load_checkpoint",
    ),
    LOSS: ("ppo_loss",),
    ALGOS: ("agg_loss", "apply_kl_penalty"),
    "verl/utils/config.py": ("validate_config",),
    "verl/trainer/constants_ppo.py": ("get_ppo_ray_runtime_env",),
    "verl/trainer/ppo/v1/trainer_base.py": (
        "_compute_old_log_prob", "_compute_ref_log_prob", "_compute_advantage", "_update_actor", "_compute_metrics", "step",
        "_step_once", "_save_checkpoint", "_load_checkpoint", "on_init_end", "on_step_end",
    ),
    "verl/trainer/ppo/v1/trainer_sync.py": ("on_init_end", "on_step_end"),
    "verl/trainer/ppo/v1/trainer_colocate_async.py": ("on_init_end", "on_step_end"),
    "verl/trainer/ppo/v1/trainer_separate_async.py": ("_compute_old_log_prob", "on_init_end", "on_step_end"),
    "verl/workers/engine_workers.py": ("init_model", "set_loss_fn"),
}  # fmt: skip
"""Functions and methods of verl that we override, wrap or call, by file."""

ROLLED = "input_ids_rmpad_rolled = torch.roll(input_ids_rmpad, shifts=-1, dims=1)"
HEAD = "    def prepare_model_inputs(self, micro_batch: TensorDict):\n"
HELPER = "    def _rolled(self, ids):\n        return torch.roll(ids, shifts=-1, dims=1)\n\n"

HARMLESS = together(
    # A helper out of prepare_model_inputs.
    replaced(ENGINE, (ROLLED, "input_ids_rmpad_rolled = self._rolled(input_ids_rmpad)"), (HEAD, HELPER + HEAD)),
    documented(TOUCHED),
    with_argument(TOUCHED),
)
"""Changes nothing that we depend on."""

HARMFUL: dict[str, tuple[Change, dict[str, str]]] = {
    "weights that the loss leaves out, and micro-batches that are run past forward_step": (
        together(
            replaced(ALGOS, ("        pg_losses = pg_losses * rollout_is_weights", "        pass")),
            replaced(
                ENGINE, ("self.forward_step(micro_batch,", "FSDPEngineWithLMHead.forward_step(self, micro_batch,")
            ),
        ),
        {
            "actor_rollout_ref.actor.policy_loss.loss_mode='vanilla' with mismatch.correction": "has tokens with the same slope",
            "mismatch.routing": "ran 4 of 4 samples without its forward_step",
        },
    ),
}
"""What changes what we depend on; for each section that a refusal names, what it says was seen."""
