"""A block's terms under a user's own loss, in the real TRL: as strong as asked for, or refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_objective")

pytestmark = pytest.mark.engine


def test_a_loss_that_trls_own_is_no_part_of_is_refused(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.own_losses, model=dense, out=tmp_path).expect()


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "bnpo", "dr_grpo", "cispo", "dapo", "vespo", "luspo"])
def test_the_weights_of_tokens_are_those_of_trls_loss_to_the_bit(loss_type: str) -> None:
    import torch
    from mismatch_ext.adapters.trl import behavior
    from trl import GRPOTrainer

    cases: list[behavior.Case] = [
        {}, behavior.SEQUENCES, {"beta": 0.1}, {"inputs.tool_mask": behavior.TOOL_MASK}, behavior.ONE_TOKEN, behavior.NO_TOKEN,
        {"current_gradient_accumulation_steps": 3}, {"current_gradient_accumulation_steps": 3, "args.steps_per_generation": 7},
        {"current_gradient_accumulation_steps": 3, "model.training": False}, {"accelerator.num_processes": 3},
        {"inputs.importance_sampling_ratio": None, "use_vllm": False}, {"args.delta": 1.1}, {"top_entropy_quantile": 0.7},
        {"max_completion_length": 11},
    ]  # fmt: skip
    probe = behavior.Probe(GRPOTrainer, loss_type, None)
    for case in cases:
        slopes = probe.slopes({**case, **behavior.OF_WEIGHTS})
        assert torch.equal(slopes.weights, slopes.of_logps), case
        trained = slopes.inputs["completion_mask"] * slopes.inputs.get("tool_mask", 1)
        assert torch.equal(slopes.weights > 0, trained.bool()), case
