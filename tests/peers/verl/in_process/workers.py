"""verl's real worker around its real FSDP engine, and the batches that its trainer would hand to it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from mismatch_ext.adapters.verl.block import RunMode
from mismatch_ext.adapters.verl.engine import register_engine
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from mismatch_ext.config import MismatchConfig
from mismatch_ext.precision.dtypes import SHORT
from tests.peers.verl.in_process.routes import carrying, nested

torch.set_num_threads(1)

R3 = {"mode": "R3", "measured": 1.0}
R2 = {"mode": "R2", "measured": 1.0}
STRATEGY, FUSED = "VERL_TEST_STRATEGY", "VERL_TEST_FUSED"
"""Environment variables of a scenario: the strategy of its engines, fsdp2 unless it is set, and 1 for verl's fused head."""
PROMPTS, RESPONSES = (6, 5, 4, 6), (8, 7, 6, 3)


def strategy() -> str:
    """Return which of verl's FSDP engines this process builds."""
    return os.environ.get(STRATEGY, "fsdp2")


def fused() -> bool:
    """Tell whether the models that this process builds have verl's fused head."""
    return os.environ.get(FUSED) == "1"


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set variables for the time of a block; None removes one."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def worker(
    model: str,
    block: dict[str, Any] | None = None,
    *,
    mode: RunMode = RunMode(),  # noqa: B008 - it is frozen
    dtype: str = "float32",
    vendor: str | None = "mismatch",
    micro_batch: int = 4,
    tokens: int | None = None,
    engine: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **model_options: Any,
) -> Any:
    """Return verl's real worker around its real engine.

    Args:
        model: Folder of the checkpoint.
        block: The `mismatch` block.
        mode: The trainer's mode.
        dtype: Compute dtype, by verl's own setting.
        vendor: Vendor of the engine; None takes verl's own.
        micro_batch: Samples per forward pass.
        tokens: Tokens per forward pass, for dynamic micro-batches.
        engine, optimizer, model_options: Further settings of verl.
    """
    config = HFModelConfig(
        path=model,
        **{
            "use_remove_padding": False,
            "enable_gradient_checkpointing": False,
            "override_config": {"attn_implementation": "sdpa"},
            "use_fused_kernels": fused(),
            "fused_kernel_options": {"impl_backend": "torch"},
            **model_options,
        },
    )
    settings = {
        "strategy": strategy(),
        "mixed_precision": {"param_dtype": SHORT[dtype], "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        "use_dynamic_bsz": tokens is not None,
        "micro_batch_size_per_gpu": micro_batch,
        "infer_micro_batch_size_per_gpu": micro_batch,
        "max_token_len_per_gpu": tokens,
        "infer_max_token_len_per_gpu": tokens,
        "use_torch_compile": False,
        **(engine or {}),
    }
    register_engine(MismatchConfig.parse(block), mode)
    torch.manual_seed(0)
    with environment(VERL_ENGINE_VENDOR=vendor):
        built = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=config,
                engine_config=FSDPEngineConfig(**settings),
                optimizer_config=FSDPOptimizerConfig(**{"lr": 1e-3, "total_training_steps": 12, **(optimizer or {})}),
                checkpoint_config=CheckpointConfig(),
            )
        )
        built.reset()
    actor = FSDPActorConfig(strategy=strategy(), rollout_n=1, ppo_micro_batch_size_per_gpu=micro_batch)
    built.set_loss_fn(partial(ppo_loss, config=actor))
    return built


def batch(samples: Sequence[int] = (0, 1, 2, 3), rollout: Tensor | None = None, **fields: Tensor) -> TensorDict:
    """Return a batch as verl's trainer hands it to a worker; a sample has the same tokens in every batch.

    Args:
        samples: Numbers of the samples.
        rollout: Routes that a rollout engine recorded of their tokens.
        fields: Further fields.
    """
    prompts, responses = [], []
    for number in samples:
        generator = torch.Generator().manual_seed(number)
        prompts.append(torch.randint(3, 16, (PROMPTS[number % 4],), generator=generator))
        responses.append(torch.randint(3, 16, (RESPONSES[number % 4],), generator=generator))
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    data = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(ids)) for ids in whole]),
            "response_mask": nested([torch.ones_like(ids) for ids in responses]),
            "loss_mask": nested([torch.ones_like(ids) for ids in responses]),
            "advantages": nested(
                [torch.full((len(ids),), (-1.0) ** number) for number, ids in zip(samples, responses, strict=True)]
            ),
            **fields,
        },
        batch_size=len(whole),
    )
    if rollout is not None:
        data["routed_experts"] = carrying(rollout, data["input_ids"])
    tu.assign_non_tensor(
        data, temperature=1.0, calculate_entropy=True, global_token_num=[len(ids) for ids in whole], compute_loss=False
    )
    return data


def scored(built: Any, data: TensorDict) -> TensorDict:
    """Run the pass that computes old log-probabilities, and add them to the batch, and routes if it returned any."""
    output = built.infer_batch(data.clone())
    data = data.clone()
    data["old_log_probs"] = response_from_nested(output["log_probs"], data["response_mask"]).float()
    if "routed_experts" in output.keys():  # a TensorDict iterates over its rows
        data["routed_experts"] = output["routed_experts"]
    if "routed_tokens" in output.keys():
        data["routed_tokens"] = output["routed_tokens"]
    return data


def logprobs(built: Any, data: TensorDict) -> list[list[float]]:
    """Return the log-probabilities of each sample's response."""
    output = built.infer_batch(data.clone())
    return [row.tolist() for row in response_from_nested(output["log_probs"], data["response_mask"]).unbind()]


def update(built: Any, data: TensorDict, mini_batch: int | None = None, epochs: int = 1, shuffle: bool = False) -> Any:
    """Run verl's update over a batch, and return its metrics."""
    data = data.clone()
    ranks = torch.distributed.get_world_size()
    size = mini_batch or len(data) * ranks
    options = {"dataloader_kwargs": {"shuffle": shuffle}, "seed": 0}
    tu.assign_non_tensor(data, mini_batch_size=size, global_batch_size=size, epochs=epochs, **options)
    return tu.get(built.train_mini_batch(data), "metrics")


def parameters(built: Any) -> str:
    """Return a digest of all weights, to the last bit."""
    digest = hashlib.sha256()
    for name, value in sorted(built.engine.module.state_dict().items()):
        digest.update(name.encode() + whole(value).float().numpy().tobytes())
    return digest.hexdigest()


def whole(value: Tensor) -> Tensor:
    """Return a tensor that ranks may share, as one."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()
