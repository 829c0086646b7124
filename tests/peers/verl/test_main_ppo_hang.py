"""A hang of verl's own trainer, ended by its own clock, and a run that goes on from what it left."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from mismatch_ext.rundata import read_run
from tests.models import tiny_model
from tests.peers.conformance import readiness
from tests.peers.verl.main_ppo import VerlRun, lasting
from tests.peers.verl.test_main_ppo_example import EVERYTHING_DENSE, check_example, run_example

pytestmark = pytest.mark.nightly

# Longer than a busy machine takes for a phase of a step; servers have ten minutes to start.
STALL = "+mismatch.monitor.stall_timeout=100"
SAVING = (*lasting(4), "trainer.save_freq=2", "trainer.resume_mode=auto")


@dataclass(frozen=True, kw_only=True)
class Example:
    """The example's two runs in one folder: the first hangs after its second step, the other goes on from there to the fourth."""

    hung: VerlRun
    resumed: VerlRun
    work: Path

    def steps(self) -> list[dict[str, float]]:
        """Return the metrics of steps 1, 3 and 4. The first run hung between the checkpoint of step 2 and that step's log."""
        return [*self.hung.expect_failure(1), *self.resumed.expect(2)]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """Return four steps of the example with every section, in float16; a fault hangs it after the second.

    Up to there nothing can be examined, for want of memory.
    """
    work = tmp_path_factory.mktemp("example")
    model = readiness.risky(tiny_model("dense", work / "dense"), work / "risky")
    faults = ("failing_weight_update@2,no_room_for_a_copy", "")
    hung, resumed = run_example(work, model, [*EVERYTHING_DENSE, STALL, *SAVING], *faults)
    return Example(hung=hung, resumed=resumed, work=work)


def test_sections_are_active_before_the_hang_and_after_it(example: Example) -> None:
    check_example(example.steps(), [example.hung, example.resumed])


def test_each_start_examines_its_first_batch(example: Example) -> None:
    failed, examined = (
        event for event in read_run(example.work / "checkpoints/mismatch").events if event.name == "doctor"
    )
    assert (failed.step, failed.level) == (1, "warning") and "MemoryError: injected" in failed.message
    assert examined.step == 3 and examined.data["causes"] == [], examined.message
    logged = ["mismatch/doctor/engine_ratio" in step for step in example.steps()]
    assert logged == [False, True, False] and all("mismatch/k3_kl" in step for step in example.steps())


def test_a_hang_is_ended_and_what_was_saved_is_there(example: Example) -> None:
    example.hung.expect_failure(1)
    assert "StallError" in example.hung.log and "updating the rollout's weights after step 2" in example.hung.log
    saved = example.work / "checkpoints/global_step_2"
    assert (saved / "mismatch.json").is_file() and list((saved / "actor").glob("model_world_size_1_rank_0.pt"))


def test_a_run_goes_on_from_what_a_hang_left_in_the_same_metrics_file(example: Example) -> None:
    assert [step["training/global_step"] for step in example.resumed.expect(2)] == [3, 4]
    data = read_run(example.work / "checkpoints/mismatch")
    # Of step 2 there is what was measured before the hang.
    assert [step.step for step in data.steps] == [1, 2, 3, 4]
    assert [end.status for end in data.ends] == ["failed", "completed"]
    assert "resumed" in {event.name for event in data.events}
    assert not [event for event in data.events if event.name == "weight_sync"]
    readiness.expect_told(data)  # of the first run; the other begins with other weights
    saved = [
        json.loads((example.work / f"checkpoints/global_step_{step}/mismatch.json").read_text())["weight_sync"][
            "engines"
        ][0]
        for step in (2, 4)
    ]
    # Each run looks at the weights that it begins with, too; step 2 was saved before its update.
    assert [engine["observations"] for engine in saved] == [2, 5] and saved[0]["baseline"] == saved[1]["baseline"]
