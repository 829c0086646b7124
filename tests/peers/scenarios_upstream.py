"""Scripts of docs/upstream against the installed peers, in one process for each peer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any


def shown(names: list[str]) -> dict[str, Any]:
    """Run scripts without their workarounds and with them."""
    from docs.upstream.shown import run_here

    return {"shown": [asdict(one) for one in run_here(names)]}
