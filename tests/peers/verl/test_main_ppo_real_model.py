"""verl's own trainer on a real vocabulary with a tied head: five weight updates in a row that move every tensor.

The model is the first four layers of SmolLM2-135M-Instruct. What the check found is compared with the model's own rounding
in the run's dtype, which is measured here, on the run's probe tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.smollm2 import unpack
from tests.oracle import FACTOR, logprobs
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.cpu.looks import LOOKS
from tests.peers.verl.main_ppo import dtypes, lasting, run_verl

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

UPDATES = 5
TENSORS = 38
"""Nine in each layer, the final norm, and the embedding, which is the head too."""
FAR = {"float32": 100 * FACTOR, "bfloat16": FACTOR}
"""Roundings by which each update moves the policy at least."""
REAL = (
    "actor_rollout_ref.model.custom_chat_template=null",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "actor_rollout_ref.rollout.max_model_len=128",
    # Its 134 million bytes hold the embedding alone: vLLM refuses a bucket that has a tied head and not the embedding.
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=128",
    "reward.custom_reward_function.name=even_share",
    "+mismatch.monitor.weight_sync=error",
)


def rounding_of(model: Path, dtype: torch.dtype, probes: list[list[int]]) -> float:
    """Return the mean distance in nats of a model in a dtype from the same weights in float64, on probe tokens."""
    tokens = torch.tensor(probes)
    everywhere = torch.ones_like(tokens)
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    apart = logprobs(rounded, tokens, everywhere).double() - logprobs(exact, tokens, everywhere)
    return float(apart.abs().mean())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_five_updates_reach_vllm_and_a_lost_tensor_ends_the_run(dtype: str, tmp_path: Path) -> None:
    """Before the first step, verl sends what the actor starts with. A tensor is lost from the sixth step on."""
    model = unpack(layers=4)
    looks = tmp_path / "looks.jsonl"
    run = run_verl(
        tmp_path,
        [*dtypes(dtype), *REAL, *lasting(UPDATES + 2)],
        model=model,
        plugin=True,
        timeout=840,
        env={LOOKS: str(looks), FAULT: f"lost_tensor@{UPDATES + 1}"},
    )
    run.expect_failure(None)
    noted: list[dict[str, Any]] = [json.loads(line) for line in looks.read_text(encoding="utf-8").splitlines()]
    verdicts = [line for line in noted if line["kind"] == "verdict"]
    movements = [line for line in noted if line["kind"] == "movement"]
    rounding = rounding_of(model, getattr(torch, dtype), verdicts[0]["probes"])
    actor = torch.tensor([verdict["actor"] for verdict in verdicts], dtype=torch.float64)
    moved = [float(change.abs().mean()) / rounding for change in actor.diff(dim=0)]
    gaps = [verdict["gap"] / rounding for verdict in verdicts]
    print([f"{v['status']}, gap {gap:.2f} roundings" for v, gap in zip(verdicts, gaps, strict=True)])
    print("moved by", [f"{distance:.0f}" for distance in moved], "roundings of", rounding)
    good = slice(0, 1 + UPDATES)
    assert [verdict["status"] for verdict in verdicts[good]] == ["in_sync"] * (1 + UPDATES)
    assert all(movement["tensors"] == TENSORS and not movement["same"] for movement in movements[good])
    assert max(gaps[good]) < FACTOR and min(moved[:UPDATES]) > FAR[dtype]
    # A tensor of the middle is compared by probes alone.
    lost = verdicts[1 + UPDATES]
    assert lost["status"] in ("stale", "garbled") and gaps[1 + UPDATES] > FACTOR, lost["message"]
    assert "WeightSyncError: " in run.log
