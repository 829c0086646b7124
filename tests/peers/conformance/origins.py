"""Rollouts whose origin is not what a host may train on, and the words with which each is refused. Imports no host."""

from __future__ import annotations

import dataclasses
from typing import Any

from mismatch_ext.rollout import Provenance

PRESENT = 3
"""Version of the weights that the engine has."""
NAMES = ("prompt_0", "prompt_1", "prompt_2", "prompt_3")

# Of each rollout, the version of the weights that sampled it; None where nobody says.
ROLLOUTS: dict[str, tuple[int | None, ...]] = {
    "present": (PRESENT,) * 4,
    "stale": (PRESENT - 1,) * 4,
    "newer": (PRESENT + 1,) * 4,
    "mixed": (PRESENT, PRESENT, PRESENT - 1, PRESENT),
    "missing": (PRESENT, None, PRESENT, PRESENT),
}
REFUSED = {
    "present": "nothing was refused",
    "stale": "RecordError: rollouts of weight version 2, but the engine is at 3; generate again after the weight update",
    "newer": "RecordError: rollouts of weight version 4, but the engine is at 3; generate again after the weight update",
    "mixed": "RecordError: rollouts of mixed provenance: .* has weight_version=3, .*2 has weight_version=2; split them",
    "missing": r"RecordError: rollout .*1 has no \w+.* \(found None\); rollouts of unknown origin are not trained on",
}


def check_header(header: dict[str, Any], engine: str) -> None:
    """Hold the header of a real run's metrics file to what a provenance says."""
    found = header["provenance"]
    assert set(found) == {field.name for field in dataclasses.fields(Provenance)}
    assert found["engine"] == engine == header["engine"]["engine"]
    assert (found["engine_version"], found["dtype"]) == (header["engine"]["version"], header["engine"]["model_dtype"])
    assert found["sampling"] == header["sampling"] and len(found["patch_digest"]) == 64
    assert found["weight_version"] in (0, 1)  # the first update may come before the file is opened
