"""Scripts of docs/upstream that show faults of verl and megatron-core."""

from __future__ import annotations

import tests.peers.verl.in_process  # noqa: F401 - first: it says how verl runs here
from tests.peers.scenarios_upstream import shown as _shown


def shown(names: list[str]) -> dict[str, object]:
    """Run scripts without their workarounds and with them."""
    return _shown(names)
