"""Ulysses sequence parallelism in verl's engine: replay on ranks that share each packed row, against one rank that has it all.

verl's own slicing, attention wrapper and gathering run; a CPU lacks flash-attention's kernel and gloo's list of `all_to_all`.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mismatch_ext.adapters.verl.bad_rows import FAULT, JUDGED
from tensordict import TensorDict
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from verl.models.transformers import monkey_patch
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from mismatch_ext import ranks as ranks_of_ours
from tests.peers.forks import on_ranks
from tests.peers.verl.in_process.routes import nested, refused
from tests.peers.verl.in_process.scenarios_replay import (
    COUNTS,
    check_same,
    everywhere,
    kept_gradients,
    sharded_to_file,
)
from tests.peers.verl.in_process.workers import batch, worker

ATTENTION = "packed_rows"


def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False) -> None:
    """Exchange tensors of one shape, by the collective that gloo has."""
    assert not async_op
    received = torch.empty_like(torch.stack(inputs))
    dist.all_to_all_single(received, torch.stack(inputs), group=group)
    for output, value in zip(outputs, received, strict=True):
        output.copy_(value)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, length: int, **kwargs: Any) -> Tensor:
    """Attend `[1, S, H, D]` along a packed row, of which position 0 begins a sequence, as flash-attention does."""
    sequence = (kwargs["position_ids"][0] == 0).cumsum(0)
    order = torch.arange(length)
    seen = (sequence[:, None] == sequence[None]) & (order[:, None] >= order[None])
    found = torch.nn.functional.scaled_dot_product_attention(
        *(states.transpose(1, 2) for states in (query, key, value)),
        attn_mask=seen,
        scale=kwargs.get("softmax_scale"),
        enable_gqa=True,
    )
    return found.transpose(1, 2)


def prepare() -> None:
    """Put torch's kernels where verl's Ulysses looks for flash-attention and NCCL."""
    AttentionInterface.register(ATTENTION, flash_attention_forward)
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)
    monkey_patch._flash_attention_forward = attend
    dist.all_to_all = all_to_all


def scored(built: Any, data: TensorDict) -> TensorDict:
    """Run the pass that computes old log-probabilities; the first of the ranks that share a row has its output, for all."""
    output = built.infer_batch(data.clone())
    own: dict[str, Any] = {}
    if output is not None:
        rows = response_from_nested(output["log_probs"], data["response_mask"]).unbind()
        own["old_log_probs"] = [row.float().tolist() for row in rows]
        for name in ("routed_experts", "routed_tokens"):
            if name in output.keys():  # a TensorDict iterates over its rows
                own[name] = [row.tolist() for row in output[name].unbind()]
    kinds = {"routed_experts": torch.int16, "routed_tokens": torch.int32}
    data = data.clone()
    for name, values in everywhere(own)[0].items():
        data[name] = nested([torch.tensor(row, dtype=kinds.get(name)) for row in values])
    return data


def shared(model: str, routes: str) -> dict[str, Any]:
    """Score and update eight samples on ranks that share their rows."""
    prepare()
    ranks = int(os.environ["WORLD_SIZE"])
    given = torch.load(routes)
    found: dict[str, Any] = {}
    for mode in ("R3", "R2"):
        built = worker(
            model,
            {"routing": {"mode": mode, "measured": 1.0}},
            micro_batch=2,
            use_remove_padding=True,
            override_config={"attn_implementation": ATTENTION},
            engine={"ulysses_sequence_parallel_size": ranks, "use_orig_params": True},
        )
        data = scored(built, batch(range(8), rollout=nested(given)) if mode == "R3" else batch(range(8)))
        gradients = kept_gradients(built)
        options = {"mini_batch_size": 8, "global_batch_size": 8, "epochs": 1, "seed": 0}
        with mock.patch.object(ranks_of_ours, "gathered") as objects:
            built.train_mini_batch(tu.assign_non_tensor(data.clone(), dataloader_kwargs={"shuffle": False}, **options))
        assert mode == "R2" or not objects.called  # ranks agree by numbers
        metrics = built.engine.mismatch_metrics()
        found[mode] = {
            "logprobs": [row.tolist() for row in data["old_log_probs"].unbind()],
            "routes": [row.tolist() for row in data["routed_experts"].unbind()],
            "counts": [metrics[name] for name in COUNTS],
            "gradients": gradients,
        }
        if mode == "R3":
            check_lost(built, given)
    return found


def check_lost(built: Any, given: list[Tensor]) -> None:
    """Check that what one of the ranks finds of a sample all say, and that all leave it out."""
    lost = [row.clone() for row in given]
    lost[1][3] = 0
    data = batch(range(8), rollout=nested(lost))
    assert "duplicate" in refused(built.infer_batch, data.clone())
    output = built.infer_batch(tu.assign_non_tensor(data, **{JUDGED: True}))
    if output is not None:
        assert [bool(row.max()) for row in output[FAULT].unbind()] == [row == 1 for row in range(8)]


def shared_to_file(model: str, routes: str, out: str) -> str:
    """Run `shared`, and return the file that has what was found."""
    found = shared(model, routes)
    path = f"{out}/shared-{dist.get_rank()}.pt"
    torch.save(found, path)
    return path


def on_two_ranks(model: str, routes: str) -> None:
    """Compare two ranks that share each row with one rank and verl's own attention on a padded batch."""
    with tempfile.TemporaryDirectory() as folder:
        (one,) = on_ranks(sharded_to_file, 1, model=model, routes=routes, out=folder)
        two, _ = on_ranks(shared_to_file, 2, model=model, routes=routes, out=folder)
        check_same(torch.load(two), torch.load(one), 1e-5, 2e-6)
