"""verl's own trainer on a real vocabulary with a tied head: five weight updates in a row that move every tensor.

The model is the first four layers of SmolLM2-135M-Instruct. What the check found is compared with the model's own rounding
in the run's dtype, which is measured here, on the run's probe tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.smollm2 import unpack
from tests.oracle import FACTOR, logprobs
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.cpu.looks import LOOKS
from tests.peers.verl.main_ppo import VerlRun, dtypes, lasting, run_verl

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

UPDATES = 5
TENSORS = 38
"""Nine in each layer, the final norm, and the embedding, which is the head too."""
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
FEWER = (
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.use_kl_loss=False",
)
"""Half of the answers and no reference: without AMX, a CPU multiplies in bfloat16 many times slower than in float32."""


def rounding_of(model: Path, dtype: torch.dtype, probes: list[list[int]]) -> float:
    """Return the mean distance in nats of a model in a dtype from the same weights in float64, on probe tokens."""
    tokens = torch.tensor(probes)
    everywhere = torch.ones_like(tokens)
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    apart = logprobs(rounded, tokens, everywhere).double() - logprobs(exact, tokens, everywhere)
    return float(apart.abs().mean())


@dataclass(frozen=True, kw_only=True)
class Updates:
    """What a run did, in units of its model's rounding on the probe tokens.

    Args:
        run: The run.
        statuses: What the check found of each update, the one before the first step included.
        gaps: Mean gap between actor and engine after each update.
        moved: How far the policy moved from one update to the next.
        tensors: Number of the actor's tensors, and those that did not change, at each update.
    """

    run: VerlRun
    statuses: list[str]
    gaps: list[float]
    moved: list[float]
    tensors: list[tuple[int, list[str]]]


def updated(dtype: str, work: Path, *more: str, steps: int, fault: str = "") -> Updates:
    """Train some steps in a dtype on both sides, each with a weight update, with more overrides where given."""
    model, looks = unpack(layers=4), work / "looks.jsonl"
    overrides = [*dtypes(dtype), *REAL, *lasting(steps), *more]
    env = {LOOKS: str(looks), FAULT: fault}
    run = run_verl(work, overrides, model=model, plugin=True, timeout=840, env=env)
    assert looks.exists(), run.log[-6000:]
    noted: list[dict[str, Any]] = [json.loads(line) for line in looks.read_text(encoding="utf-8").splitlines()]
    verdicts = [line for line in noted if line["kind"] == "verdict"]
    rounding = rounding_of(model, getattr(torch, dtype), verdicts[0]["probes"])
    actor = torch.tensor([verdict["actor"] for verdict in verdicts], dtype=torch.float64)
    found = Updates(
        run=run,
        statuses=[verdict["status"] for verdict in verdicts],
        gaps=[verdict["gap"] / rounding for verdict in verdicts],
        moved=[float(change.abs().mean()) / rounding for change in actor.diff(dim=0)],
        tensors=[(line["tensors"], line["same"]) for line in noted if line["kind"] == "movement"],
    )
    print(f"rounding to {dtype}: {rounding:.2g} nats", found.statuses, found.gaps, found.moved)
    return found


def expect_five_to_arrive(found: Updates, far: float) -> None:
    """Assert that five updates moved every tensor and the policy by so many roundings, and left a gap of rounding alone."""
    assert found.statuses[: 1 + UPDATES] == ["in_sync"] * (1 + UPDATES)
    assert found.tensors[: 1 + UPDATES] == [(TENSORS, [])] * (1 + UPDATES)
    assert max(found.gaps[: 1 + UPDATES]) < FACTOR and min(found.moved[:UPDATES]) > far


def test_five_float32_updates_reach_vllm_and_a_lost_tensor_ends_the_run(tmp_path: Path) -> None:
    """The tensor is lost from the sixth step on, and is compared by probes alone. So the second bad update ends the run."""
    found = updated("float32", tmp_path, steps=UPDATES + 2, fault=f"lost_tensor@{UPDATES + 1}")
    found.run.expect_failure(None)
    expect_five_to_arrive(found, far=100 * FACTOR)
    assert len(found.statuses) == UPDATES + 3 and "in_sync" not in found.statuses[1 + UPDATES :]
    assert min(found.gaps[1 + UPDATES :]) > 100 * FACTOR
    assert "training failed after 7 steps: WeightSyncError: weight update 8: " in found.run.log


def test_five_bfloat16_updates_reach_vllm(tmp_path: Path) -> None:
    """One step changes a single tensor by less than bfloat16 rounds, so that no tensor is lost here."""
    found = updated("bfloat16", tmp_path, *FEWER, steps=UPDATES)
    found.run.expect(UPDATES)
    expect_five_to_arrive(found, far=2.0)
