"""A block's terms under a user's own loss, in the real TRL: as strong as asked for, or refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.errors import ConfigError
from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_objective")

pytestmark = pytest.mark.engine


def test_a_loss_that_trls_own_is_no_part_of_is_refused(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.own_losses, model=dense, out=tmp_path).expect()


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "bnpo", "dr_grpo", "cispo", "dapo", "vespo", "luspo"])
def test_the_weights_of_tokens_are_those_of_trls_loss_to_the_bit(loss_type: str) -> None:
    import torch
    from mismatch_ext.adapters.trl import aggregation, behavior
    from trl import GRPOTrainer

    cases: list[behavior.Case] = [
        {}, behavior.SEQUENCES, {"beta": 0.1}, {"inputs.tool_mask": behavior.TOOL_MASK}, behavior.ONE_TOKEN, behavior.NO_TOKEN,
        {"current_gradient_accumulation_steps": 3}, {"current_gradient_accumulation_steps": 3, "args.steps_per_generation": 7},
        {"current_gradient_accumulation_steps": 3, "model.training": False}, {"accelerator.num_processes": 3},
        {"inputs.importance_sampling_ratio": None, "use_vllm": False}, {"args.delta": 1.1}, {"top_entropy_quantile": 0.7},
        {"max_completion_length": 11},
    ]  # fmt: skip
    for case in cases:
        trainer = behavior.stand_in(GRPOTrainer, {"loss_type": loss_type, **case})
        given = {**behavior.INPUTS, **behavior.OF_GRPO}
        given |= {name.removeprefix("inputs."): value for name, value in case.items() if name.startswith("inputs.")}
        inputs = {name: value for name, value in given.items() if value is not None}
        found = aggregation.token_weights(trainer, inputs)
        assert torch.equal(found, aggregation.read_weights(trainer, behavior.MODEL, inputs)), case
        assert bool((found > 0).equal((inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool())), case
        aggregation.prove_weights(found, trainer, behavior.MODEL, inputs)
        if bool(found.any()):
            with pytest.raises(ConfigError, match="gives a token the weight"):
                aggregation.prove_weights(1.001 * found, trainer, behavior.MODEL, inputs)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "luspo"])
def test_the_weights_of_tokens_are_read_without_another_rank(loss_type: str) -> None:
    from typing import Any

    from mismatch_ext.adapters.trl import aggregation, behavior
    from trl import GRPOTrainer

    asked = []

    def all_ranks(tensor: Any, *_: Any, **__: Any) -> Any:
        asked.append(tensor)
        return tensor

    of_ranks = {f"accelerator.{name}": all_ranks for name in ("gather", "gather_for_metrics", "reduce")}
    trainer = behavior.stand_in(GRPOTrainer, {"loss_type": loss_type, **of_ranks})
    inputs = {**behavior.INPUTS, **behavior.OF_GRPO}
    found = aggregation.read_weights(trainer, behavior.MODEL, inputs)
    assert not asked and bool((found > 0).equal(inputs["completion_mask"].bool()))
