"""What an agent loop of verl makes of its turns: each fault is named, in the seam that vLLM's and SGLang's servers share.

Whole runs are in `test_main_ppo.py` (vLLM) and `test_main_ppo_sglang.py`, and the faults of one in
`test_main_ppo_sglang_float16.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_turns as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_turns")

NAMED = {
    "nothing": r"$",
    "tokenised anew": r"RecordError: completion uid_0_0: token 0 of the completion was changed after turn 0 had sampled it: id 1",
    "dropped": r"RecordError: completion uid_0_0: turn 1 was dropped: the engine sampled 2 tokens behind token 3 of the ",
    "two versions": r"ProvenanceError: completion uid_0_0: turn 0 was sampled by weight version 4, turn 1 by weight version 5: ",
    "asynchronous": r"$",
    "moved": r"RecordError: completion uid_0_0: token 0 of the completion is trained with log-probability 0.0, and the engine ",
    # Of calls that nobody saw, nothing is known.
    "another client": r"$",
}


def test_what_goes_wrong_between_turns_is_named(run: Run) -> None:
    found = run(scenarios.told).expect()
    assert set(found) == set(NAMED)
    for case, words in NAMED.items():
        assert re.match(words, found[case]), (case, found[case])


def test_masks_go_with_the_tokens_that_they_are_of_or_it_is_said_why_not(run: Run) -> None:
    found = run(scenarios.masked).expect()
    # Three turns of the policy, and the tool's two tokens between them.
    assert found["nothing"] == [[0, 1], [0, 2], [], [], [0, 3], [0, 4], [], [], [0, 5]]
    assert "completion uid_0_0: the engine sent no sampling masks" in found["no masks"]
    assert "rollout r, token 1: at least 24 tokens were left" in found["unknown masks"]
    assert "an answer of 2 tokens has sampling masks of 1" in found["fewer masks"]
    assert "no call of the engine has sampled its tokens" in found["another client"]
