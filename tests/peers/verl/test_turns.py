"""What an agent loop of verl makes of its turns: each fault is named, in the seam that vLLM's and SGLang's servers share.

Whole runs are in `test_main_ppo.py` (vLLM) and `test_main_ppo_sglang.py`, and the faults of one in
`tests/evidence/test_main_ppo_sglang.py`.
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
