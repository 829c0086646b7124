"""One patch of a module function under every order of imports, patching and reverting, in fresh processes."""

from __future__ import annotations

import itertools
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
    "import patch": "ok ok | patched -",
    "patch import": "ok ok | patched -",
    "by_value patch": "ok conflict | stock stock",
    "patch by_value": "ok ok | patched patched",
    "patch revert": "ok ok | stock -",
    "import by_value patch": "ok ok conflict | stock stock",
    "by_value import patch": "ok ok conflict | stock stock",
    "by_value patch import": "ok conflict ok | stock stock",
    "import patch by_value": "ok ok ok | patched patched",
    "patch import by_value": "ok ok ok | patched patched",
    "patch by_value import": "ok ok ok | patched patched",
    "import patch revert": "ok ok ok | stock -",
    "patch import revert": "ok ok ok | stock -",
    "patch revert import": "ok ok ok | stock -",
    "by_value patch revert": "ok conflict ok | stock stock",
    "patch by_value revert": "ok ok conflict | stock patched",
    "patch revert by_value": "ok ok ok | stock stock",
    "import by_value patch revert": "ok ok conflict ok | stock stock",
    "by_value import patch revert": "ok ok conflict ok | stock stock",
    "by_value patch import revert": "ok conflict ok ok | stock stock",
    "by_value patch revert import": "ok conflict ok ok | stock stock",
    "import patch by_value revert": "ok ok ok conflict | stock patched",
    "patch import by_value revert": "ok ok ok conflict | stock patched",
    "patch by_value import revert": "ok ok ok conflict | stock patched",
    "patch by_value revert import": "ok ok conflict ok | stock patched",
    "import patch revert by_value": "ok ok ok ok | stock stock",
    "patch import revert by_value": "ok ok ok ok | stock stock",
    "patch revert import by_value": "ok ok ok ok | stock stock",
    "patch revert by_value import": "ok ok ok ok | stock stock",
    # Patching again is a conflict while the first is applied, never a second layer; after a revert it works.
    "patch again": "ok conflict | patched -",
    "import patch again": "ok ok conflict | patched -",
    "patch import again": "ok ok conflict | patched -",
    "patch again import": "ok conflict ok | patched -",
    "patch again revert": "ok conflict ok | stock -",
    "patch revert again": "ok ok ok | patched -",
    "import patch again revert": "ok ok conflict ok | stock -",
    "patch import again revert": "ok ok conflict ok | stock -",
    "patch again import revert": "ok conflict ok ok | stock -",
    "patch again revert import": "ok conflict ok ok | stock -",
    "import patch revert again": "ok ok ok ok | patched -",
    "patch import revert again": "ok ok ok ok | patched -",
    "patch revert import again": "ok ok ok ok | patched -",
    "patch revert again import": "ok ok ok ok | patched -",
    # A patched block that raises reverts like one that ends.
    "raise": "ok | stock -",
    "import raise": "ok ok | stock -",
    "raise import": "ok ok | stock -",
    "by_value raise": "ok conflict | stock stock",
    "raise by_value": "ok ok | stock stock",
    "import by_value raise": "ok ok conflict | stock stock",
    "by_value import raise": "ok ok conflict | stock stock",
    "by_value raise import": "ok conflict ok | stock stock",
    "import raise by_value": "ok ok ok | stock stock",
    "raise import by_value": "ok ok ok | stock stock",
    "raise by_value import": "ok ok ok | stock stock",
}


def orders(needed: set[str], optional: set[str]) -> set[str]:
    """Every order of the needed and any of the optional actions, with `again` and `revert` after `patch`."""
    found = set()
    for size in range(len(optional) + 1):
        for chosen in itertools.combinations(sorted(optional), size):
            for order in itertools.permutations(sorted(needed) + list(chosen)):
                later = [order.index(action) for action in ("again", "revert") if action in order]
                if "patch" not in order or all(order.index("patch") < index for index in later):
                    found.add(" ".join(order))
    return found


def test_every_order_has_an_expectation() -> None:
    generated = (
        orders({"patch"}, {"import", "by_value", "revert"})
        | orders({"patch", "again"}, {"import", "revert"})
        | orders({"raise"}, {"import", "by_value"})
    )
    assert sorted(generated - EXPECTED.keys()) == [], "orders without an expectation"
    assert sorted(EXPECTED.keys() - generated) == [], "expectations of orders that cannot happen"


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
