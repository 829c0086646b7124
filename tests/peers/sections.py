"""Write docs/sections.md: `python -m tests.peers.sections` builds every section and preset in every host, in a few minutes.

A test fails when the page is not what the hosts do.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.models import tiny_model
from tests.peers.scenarios import Forks, Scenario, named
from tests.peers.section_cases import page
from tests.rendezvous import rendezvous

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_sections as in_trl
    from tests.peers.verl.in_process import scenarios_sections as in_verl
else:
    in_trl = named("tests.peers.trl.scenarios_sections")
    in_verl = named("tests.peers.verl.in_process.scenarios_sections")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sections.md"


def main() -> None:
    """Run every case and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        models = {kind: tiny_model(kind, Path(folder) / kind) for kind in ("dense", "moe")}
        forks, found = Forks(), {}
        try:
            scenario: Scenario = in_trl.hosts  # type: ignore[assignment]
            given: dict[str, Any] = {**models, "out": Path(folder) / "trl"}
            found |= forks.run(scenario, given, rendezvous(), 900).expect()
            scenario = in_verl.every  # type: ignore[assignment]
            found["verl"] = forks.run(scenario, {**models, "out": Path(folder) / "verl"}, rendezvous(), 900).expect()
        finally:
            forks.close()
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
