"""A model that mixes experts and sees images, in real vLLM: its tokens and routes are transformers', for each image its own.

Both ask for torchvision, which has no build for a CPU here; the one that SGLang's environment has is taken from there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.peers.engines.sglang_environment import PYTHON, SHIMS
from tests.peers.engines.tiny_images import IMAGE_TOKENS
from tests.peers.scenarios import named, run_fresh

if TYPE_CHECKING:
    from tests.peers.engines import scenarios_vllm_images as scenarios
else:
    scenarios = named("tests.peers.engines.scenarios_vllm_images")

pytestmark = pytest.mark.engine


def borrowed(folder: Path) -> Path:
    """Return a folder with SGLang's torchvision, and with what lets a CPU build of torch import it."""
    [packages] = PYTHON.parents[1].glob("lib/python3.*/site-packages")
    found = list(packages.glob("torchvision*"))
    assert found, f"{packages} has no torchvision: run `make setup`"
    folder.mkdir()
    for part in (*found, SHIMS / "sitecustomize.py"):
        (folder / part.name).symlink_to(part)
    return folder


@pytest.mark.numeric
def test_image_tokens_are_routed_as_transformers_routes_them(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(borrowed(tmp_path / "torchvision")),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    payload = {"out": tmp_path}
    one, other = run_fresh(
        scenarios.image_in_a_prompt, payload, environment, timeout=600, python=Path(sys.executable)
    ).expect()
    for found in (one, other):
        assert found["prompt"] == found["ours"] and found["image_rows"] == IMAGE_TOKENS
        assert found["gap"] <= 1e-5 and found["replayed_gap"] <= 1e-5
        assert found["differing"] == 0 and found["rows"] == len(found["prompt"]) + 7 and found["layers"] == 4
    # The same token ids with another image: the routes are of what it shows.
    pairs = list(zip(one["routes_of_image"], other["routes_of_image"], strict=True))
    assert one["prompt"] == other["prompt"] and len(pairs) == IMAGE_TOKENS
    assert sum(a != b for a, b in pairs) > IMAGE_TOKENS / 2
