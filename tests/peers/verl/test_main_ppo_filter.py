"""verl's own trainer with DAPO's filter: groups of one reward are evicted, and others sampled in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from tests.peers.verl.main_ppo import ANSWERS, CPU, PROMPTS, run_verl
from tests.peers.verl.test_main_ppo import EVERYTHING, FLOAT32_K3

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

FILTER = (
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=reward",
    # A sampler of a user's own filters for itself: verl's buffer alone knows the setting.
    *(f"trainer.v1.sampler.custom_sampler.{name}=null" for name in ("path", "name")),
    f"reward.custom_reward_function.path={CPU}/reward.py",
    "reward.custom_reward_function.name=odd_alone",
    "actor_rollout_ref.model.use_remove_padding=True",
    "trainer.total_epochs=12",
)


def test_every_section_over_groups_that_the_filter_left(moe: Path, tmp_path: Path) -> None:
    run = run_verl(tmp_path, [*EVERYTHING, *FILTER], model=moe, plugin=True)
    steps = run.expect(3)
    assert sum(step.get("training/filter_groups/evicted_samples", 0) for step in steps) > 0
    for step in steps:
        assert step["mismatch/sequences"] == PROMPTS * ANSWERS and step["critic/score/max"] <= 1.0
        assert all(0 <= step[f"mismatch/{name}"] <= FLOAT32_K3 for name in ("k3_kl", "native/k3_kl"))
        assert step["mismatch/routing/set_mismatch_frac"] == 0.0
    assert [step["mismatch/lr_multiplier"] for step in steps] == [1.0, 1.0, 0.5]
    data = read_run(tmp_path / "checkpoints/mismatch")
    assert [step.step for step in data.steps] == [1, 2, 3]
