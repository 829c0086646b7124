"""Times ingest and alignment of recorded routing against verl 0.9.1's own path."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness import paired
from mismatch_ext.routing import RoutingTrace, align_packed

SEQUENCES, PROMPT, LAYERS, EXPERTS, TOP_K = 512, 64, 48, 128, 8
"""Qwen3-30B-A3B's routers; responses are short so that both sides' copies fit a small machine."""

Ids = NDArray[np.uint8]


def recordings() -> tuple[list[Ids], list[int]]:
    """Return what vLLM returns, uint8 `[tokens - 1, layers, top_k]` of distinct random experts, and tokens per sequence."""
    random = np.random.default_rng(0)
    pool = random.random((1 << 14, EXPERTS)).argsort(1)[:, :TOP_K].astype(np.uint8)
    tokens = [PROMPT + int(n) for n in random.integers(64, 513, SEQUENCES)]
    ids = [pool[random.integers(0, len(pool), (n - 1) * LAYERS)].reshape(n - 1, LAYERS, TOP_K) for n in tokens]
    return ids, tokens


class Verl:
    """verl's path in its own order and by its own functions; no engine, Ray or queue is started.

    `AgentLoopOutput.as_dict` widens to int16 and pads to the sequence (what its current trainer calls for each rollout), the
    queue hands rows on as a jagged tensor, and `align_r3_router_replay_data` and `build_r3_replay_mask` make the replay's
    input. Left out, on both sides: what follows per layer in the model (int64 ids, ranks).
    """

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
            from verl.utils.megatron.router_replay_utils import align_r3_router_replay_data, build_r3_replay_mask
        self.output, self.align, self.mask = AgentLoopOutput, align_r3_router_replay_data, build_r3_replay_mask

    def record(self, tokens: int, ids: Ids | None) -> dict[str, Any]:
        """Return a rollout as verl's trainer stores it."""
        response = tokens - PROMPT
        rollout = self.output(
            prompt_ids=[0] * PROMPT,
            response_ids=[0] * response,
            response_mask=[1] * response,
            routed_experts=ids,
            metrics={},
        )
        fields: dict[str, Any] = rollout.as_dict()
        return fields

    def prepare(self, ids: list[Ids], tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Return the replay's expert ids `[tokens, layers, top_k]` and mask `[tokens]`, packed."""
        fields = [self.record(n, x) for n, x in zip(tokens, ids, strict=True)]
        nested = torch.nested.as_nested_tensor([f["routed_experts"] for f in fields], layout=torch.jagged)
        inputs = torch.nested.as_nested_tensor(
            [torch.cat([f["prompts"], f["responses"]]) for f in fields], layout=torch.jagged
        )
        mask = torch.nested.as_nested_tensor([f["response_mask"] for f in fields], layout=torch.jagged)
        return self.align(nested, inputs).values(), self.mask(inputs, mask).values()


def ingested(row: int, array: Ids, tokens: int) -> RoutingTrace:
    """Return the checked trace of one sequence."""
    return RoutingTrace.ingest(
        array,
        num_experts=EXPERTS,
        layers=range(LAYERS),
        tokens=tokens,
        version=0,
        request=str(row),
        top_k=TOP_K,
        last_row=False,
    )


def ours(ids: list[Ids], tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Return the same from checked traces."""
    traces = [ingested(row, array, count) for row, (array, count) in enumerate(zip(ids, tokens, strict=True))]
    trace, mask = align_packed(traces, tokens)
    return trace.parts[0], mask


def run() -> list[dict[str, Any]]:
    """Return the rows of this benchmark."""
    verl = Verl()
    ids, tokens = recordings()
    experts, mask = ours(ids, tokens)
    theirs, their_mask = verl.prepare(ids, tokens)
    assert torch.equal(mask, their_mask) and torch.equal(experts[mask].to(torch.int16), theirs[mask])
    megabytes = sum(x.nbytes for x in ids) / 1e6
    what = f"{SEQUENCES} sequences, {sum(tokens)} tokens, {megabytes:.0f} MB of routes"
    del experts, theirs

    def ours_with_rollouts() -> tuple[Tensor, Tensor]:
        # verl's record also turns token lists into tensors. Do that here too, so that only routing differs.
        fields = [verl.record(n, None) for n in tokens]
        inputs = [torch.cat([f["prompts"], f["responses"]]) for f in fields]
        torch.nested.as_nested_tensor(inputs, layout=torch.jagged)
        torch.nested.as_nested_tensor([f["response_mask"] for f in fields], layout=torch.jagged)
        return ours(ids, tokens)

    return [
        paired(
            f"routes checked, stored and packed vs verl 0.9.1 unchecked, its own functions; {what}",
            ours_with_rollouts,
            lambda: verl.prepare(ids, tokens),
            equal="every recorded expert id and the whole mask",
            repeats=7,
        )
    ]
