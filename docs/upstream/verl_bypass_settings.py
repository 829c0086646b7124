"""`rollout_correction.bypass_mode` with a rejection reaches only verl's driver: its loss rejects nothing, and says nothing."""

import torch
from hydra import compose, initialize_config_module
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

PEER = "verl"
REPORTED = "not reported"
WORKAROUND = "`set_correction` (adapters/verl/config.py) sets `policy_loss` to those of `mismatch.correction`"
FLAGS = ["bypass_mode=True", "rollout_is=token", "rollout_rs=token_k1", "rollout_rs_threshold=0.9_1.1"]
EXPECTED = 0.0


def seen(prepare=lambda config: None) -> float:
    """Return the gradient at a token whose ratio of 2 is out of the bounds that were given, in the loss that verl runs."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [f"++algorithm.rollout_correction.{flag}" for flag in FLAGS])
    prepare(config)
    actor = config.actor_rollout_ref.actor
    actor.ppo_micro_batch_size_per_gpu = 1
    policy = torch.zeros(1, 2).requires_grad_()
    rollout = torch.tensor([[0.0, -0.6931472]])
    loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
    value = loss(rollout, policy, -torch.ones(1, 2), torch.ones(1, 2), config=omega_conf_to_dataclass(actor))[0]
    value.backward()
    return float(policy.grad[0, 1].abs())


def with_workaround() -> float:
    """Prepare the configuration as a run with a block is."""
    from mismatch_ext.adapters.verl.config import set_correction

    from mismatch_ext.config import CorrectionConfig

    section = CorrectionConfig(preset="bypass_ppo_clip", reject={"token_k1": (0.9, 1.1)})
    return seen(lambda config: set_correction(config, section))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
