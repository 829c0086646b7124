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

OFF = "loss_agg_mode='token-mean': on made-up rows the loss is off by"
HARMFUL: dict[str, tuple[Change, dict[str, str]]] = {
    "another mean of the loss, and rows dropped by prepare_model_inputs": (
        together(
            replaced(ALGOS, ("/ batch_num_tokens * dp_size", "/ batch_num_tokens * dp_size * 2")),
            replaced(ENGINE, ('"input_ids": input_ids_rmpad,', '"input_ids": input_ids_rmpad[:, :-1],')),
        ),
        {"mismatch.kl": OFF, "mismatch.sampling_mask and mismatch.routing.mode='R2'": "lays [3, 4,"},
    ),
    "weights that the loss leaves out, and micro-batches that are run past forward_step": (
        together(
            replaced(ALGOS, ("        pg_losses = pg_losses * rollout_is_weights", "        pass")),
            replaced(
                ENGINE, ("self.forward_step(micro_batch,", "FSDPEngineWithLMHead.forward_step(self, micro_batch,")
            ),
        ),
        {"mismatch.kl": OFF, "mismatch.routing": "ran 4 of 4 samples without its forward_step"},
    ),
}
"""What changes what we depend on; for each section that a refusal names, what it says was seen."""
