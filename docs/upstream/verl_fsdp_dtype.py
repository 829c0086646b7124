"""`fsdp_config.dtype`, documented as the training dtype, is not read by verl's FSDP engine, which computes in bfloat16."""

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

PEER = "verl"
REPORTED = "not reported"
WORKAROUND = "`precision.dtype` (adapters/verl/config.py) sets `mixed_precision`, which is read"
EXPECTED = "torch.float16"


def seen(prepare=lambda config: None) -> str:
    """Return the dtype of autocast that the engine takes for an actor with `dtype: float16`."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", ["actor_rollout_ref={actor:{fsdp_config:{dtype:float16}},rollout:{name:vllm}}"])
    OmegaConf.set_struct(config, False)
    prepare(config)
    engine = object.__new__(FSDPEngine)
    engine.engine_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor.fsdp_config)
    try:
        engine._build_fsdp_module(torch.nn.Linear(1, 1))
    except AttributeError:  # it has no model yet, which comes after the dtype
        return str(engine._autocast_dtype)


def with_workaround() -> str:
    from mismatch_ext.adapters.verl.config import set_precision

    from mismatch_ext.config import MismatchConfig

    return seen(lambda config: set_precision(config, MismatchConfig.parse({"precision": {"dtype": "float16"}})))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
