"""verl's configuration of an actor's loss, and batches for it."""

from __future__ import annotations

from typing import Any

import torch
import verl  # noqa: F401  loads the platform before anything asks for it
from hydra import initialize_config_module
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from mismatch_ext.config import MismatchConfig
from tests.peers.verl.composed import composed
from tests.peers.verl.in_process.routes import nested
from tests.peers.verl.in_process.workers import fused, strategy

END = 0
PROMPT = [1, 2, 3, 1]


def actor_config(loss: dict[str, Any] | None = None, **given: Any) -> FSDPActorConfig:
    """Return verl's configuration of an actor."""
    return FSDPActorConfig(
        strategy=strategy(),
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=4,
        policy_loss=PolicyLossConfig(**(loss or {})),
        **given,
    )


def host_config(*overrides: str) -> DictConfig:
    """Return verl's whole configuration, as its command line composes it."""
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        return composed(
            f"actor_rollout_ref.actor.strategy={strategy()}",
            f"actor_rollout_ref.model.use_fused_kernels={fused()}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            *overrides,
        )


def driven(config: DictConfig) -> Any:
    """Return the actor's configuration of a worker, as verl makes it from the driver's."""
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def block_of(**sections: Any) -> MismatchConfig:
    """Return a block."""
    block = MismatchConfig.parse(sections)
    assert block is not None
    return block


def batch_of(
    responses: list[Tensor], fields: dict[str, list[Tensor]], prompts: list[Tensor] | None = None, **extra: Any
) -> TensorDict:
    """Return a batch as verl's workers get it; a field may replace those that are built."""
    prompts = prompts or [torch.tensor(PROMPT) for _ in responses]
    built = {
        "prompts": prompts, "responses": responses, "input_ids": [torch.cat(x) for x in zip(prompts, responses, strict=True)],
        "position_ids": [torch.arange(len(p) + len(r)) for p, r in zip(prompts, responses, strict=True)],
        "response_mask": [torch.ones_like(r) for r in responses], "loss_mask": [torch.ones_like(r) for r in responses],
        "advantages": [torch.zeros(len(r)) for r in responses], "old_log_probs": [torch.zeros(len(r)) for r in responses],
        **fields,
    }  # fmt: skip
    data = TensorDict({name: nested(rows) for name, rows in built.items()}, batch_size=len(responses))
    tu.assign_non_tensor(data, **{"temperature": 1.0, "calculate_entropy": False, **extra})
    return data


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """Return gradients as one vector, in the order of their names."""
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def relative(a: Tensor, b: Tensor) -> float:
    """Return the relative distance of two vectors."""
    return float((a - b).norm() / b.norm())


def loss_on(loss: Any, logps: Tensor, data: TensorDict) -> Any:
    """Call a loss as verl's engine does, with log-probabilities `[N, T]` of responses of one length."""
    rows, length = logps.shape
    prompt = data["prompts"].offsets().diff().tolist()
    parts = [torch.cat([logps.new_zeros(p - 1), logps[i], logps.new_zeros(1)]) for i, p in enumerate(prompt)]
    offsets = torch.tensor([0, *[p + length for p in prompt]]).cumsum(0)
    data = data.clone()
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=rows * length, global_batch_size=rows)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)}
    return loss(model_output=output, data=data, dp_group=None)
