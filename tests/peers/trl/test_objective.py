"""A block's terms under a user's own loss, in the real TRL: as strong as asked for, or refused before the first step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mismatch_ext.errors import ConfigError
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_objective as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_objective")

pytestmark = pytest.mark.engine


def test_a_loss_that_trls_own_is_no_part_of_is_refused(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.own_losses, model=dense, out=tmp_path).expect()
    words = {
        "OwnLast/surrogate": ["mismatch.kl with OwnLast", "super()._compute_loss", "remove"],
        "Alternating/surrogate": ["mismatch.kl with Alternating", "micro-batch"],
        "OwnSteps/surrogate": ["mismatch.kl with OwnSteps", "remove"],
        "DetachedFirst/weights": ["mismatch.correction with DetachedFirst", "does not depend on the weights"],
    }
    for name, expected in words.items():
        assert all(word in found[name]["refused"] for word in expected), (name, found[name])
        assert found[name]["steps"] == 0 and not found[name]["moved"], name
    # A KL that is all in the rewards needs nothing of TRL's loss.
    assert found["OwnLast/rewards"]["moved"] and any(found["OwnLast/rewards"]["kl_rewards"])


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


def test_a_copy_of_a_trainer_waits_for_no_device_and_asks_no_pickle() -> None:
    """A class that Ray pickles leaves out what it cannot send."""
    from types import SimpleNamespace
    from typing import Any

    import torch
    from mismatch_ext.adapters.trl import aggregation

    class Pickled:
        args = accelerator = SimpleNamespace()
        sized = 3

        def __reduce__(self) -> Any:
            raise TypeError("an engine cannot be pickled")

    trainer = Pickled()
    trainer.sized = 5
    stand_in = aggregation._stand_in(trainer, torch.zeros(1, 2))
    assert stand_in.sized == 5 and type(stand_in) is Pickled
    on_device = torch.zeros(2, 3, device="meta")  # whose values cannot be read
    for name in ("gather", "reduce"):
        assert math.isnan(getattr(stand_in.accelerator, name)(on_device, reduction="sum").mean().item())


def test_a_replaced_loss_is_not_taken_for_trls(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.replaced, model=dense, out=tmp_path).expect()
    assert all(word in found for word in ("GRPOTrainer._compute_loss of trl", "no longer", "instead of")), found


def test_passes_of_a_batch_are_bound_to_its_tokens(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.rewarded, model=dense, out=tmp_path).expect()
    assert found["kl_error"] < 1e-5 and found["spread"] > 0.1
    assert found["rloo_error"] < 1e-5 and found["rloo_passes"] >= 3
