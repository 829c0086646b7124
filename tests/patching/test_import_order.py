"""One patch of a module function under orders of imports, patching and reverting that differ, in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("import_order_runner.py")

# Actions in order, and: outcome of each | function in its own module, function in a module that has
# `from upst.core import greet`; "-" is a module that was never imported.
EXPECTED = {
    # An import by value before patching is a conflict, and nothing is changed; one while patched is a
    # conflict when reverting, because that module keeps the replacement.
    "patch": "ok | patched -",
    "by_value patch": "ok conflict | stock stock",
    "patch by_value": "ok ok | patched patched",
    "by_value patch import": "ok conflict ok | stock stock",
    "import patch revert": "ok ok ok | stock -",
    "by_value patch revert": "ok conflict ok | stock stock",
    "patch by_value revert": "ok ok conflict | stock patched",
    "patch revert by_value": "ok ok ok | stock stock",
    "patch by_value revert import": "ok ok conflict ok | stock patched",
    # Patching again is a conflict while the first is applied, never a second layer; after a revert it works.
    "patch again": "ok conflict | patched -",
    "patch again revert": "ok conflict ok | stock -",
    "patch revert again": "ok ok ok | patched -",
    # A patched block that raises reverts like one that ends.
    "raise": "ok | stock -",
    "by_value raise": "ok conflict | stock stock",
    "import raise by_value": "ok ok ok | stock stock",
}


@pytest.mark.parametrize("order", EXPECTED)
def test_order(order: str, upstream_dir: Path) -> None:
    spec = find_spec("mismatch_ext")
    assert spec is not None and spec.submodule_search_locations
    command = [
        sys.executable,
        str(RUNNER),
        spec.submodule_search_locations[0],
        str(upstream_dir),
        *order.split(),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == EXPECTED[order]
