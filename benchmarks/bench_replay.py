"""Times a training step of a transformers MoE model with routing replay against the same step without it."""

from __future__ import annotations

from typing import Any

import torch
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing
from torch import Tensor, nn

from benchmarks.harness import paired

LAYERS, EXPERTS, TOP_K, HIDDEN, BATCH, WIDTH = 4, 64, 8, 512, 2, 1024


def build() -> nn.Module:
    """Return a Qwen3-MoE of 4 layers, 64 experts, 8 per token, hidden size 512."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=1024,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config).train()


def step(model: nn.Module, ids: Tensor) -> Tensor:
    """Run forward and backward; return the loss."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def run() -> list[dict[str, Any]]:
    """Return the rows of this benchmark; the ratio is the time of the plain step over that with replay."""
    model = build()
    ids = torch.randint(1024, (BATCH, WIDTH), generator=torch.Generator().manual_seed(1))
    rows = BATCH * WIDTH
    with torch.no_grad(), record_routing(model) as recording:
        model(input_ids=ids, use_cache=False)
    trace = recording.trace
    assert trace.nbytes == rows * LAYERS * TOP_K
    mask = (torch.arange(rows) + 1) % WIDTH != 0  # as after generation: the last token of each sequence has no route

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with two threads, the gradients of two plain steps may differ in their last bits
    loss, expected = step(model, ids), gradients()
    for chosen in (None, mask):
        with replay_routing(model, trace, chosen):
            assert torch.equal(step(model, ids), loss)
        got = gradients()
        assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
    torch.set_num_threads(threads)

    def replayed(chosen: Tensor | None, others: Any = "refuse") -> None:
        with replay_routing(model, trace, chosen, others=others):
            step(model, ids)

    what = f"forward and backward, {LAYERS} layers, {EXPERTS} experts top-{TOP_K}, hidden {HIDDEN}, {rows} tokens"
    equal = "loss and all gradients, bit for bit, replaying the model's own routing"
    return [
        paired(f"{what}: replay vs none", lambda: replayed(None), lambda: step(model, ids), equal=equal, repeats=5),
        paired(
            f"{what}: replay of all but each last token vs none",
            lambda: replayed(mask),
            lambda: step(model, ids),
            equal=equal,
            repeats=3,
        ),
        paired(
            f"{what}: replay that compares its tokens vs replay that does not",
            lambda: replayed(None),
            lambda: replayed(None, "replay"),
            equal=equal,
            repeats=5,
        ),
    ]
