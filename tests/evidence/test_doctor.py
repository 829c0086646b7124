"""The doctor's first example in docs/doctor.md: it names top-p, tries the fix, and explains the gap."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.commands import ROOT, shell

PAGE, OUT = ROOT / "docs/doctor.md", "runs/top_p"
FIGURES = ("verdict", "tokens", "responses", "gap", "parts", "trainer_ratio", "mended")
pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(900)]


def test_the_first_example_names_top_p(evidence: Callable[..., None]) -> None:
    """The command of the page ends with status 1, and names one cause, which it confirmed in the engine."""
    (command,) = re.findall(rf"^mismatch-ext doctor .* --out {OUT}$", PAGE.read_text(encoding="utf-8"), re.M)
    printed = shell(command, statuses=(1,)).splitlines()
    found = json.loads((ROOT / OUT / "doctor.json").read_text(encoding="utf-8"))
    (cause,) = found["causes"]
    assert (found["verdict"], cause["key"], cause["status"]) == ("explained", "top_p", "confirmed")
    assert cause["parameter"] == pytest.approx(0.9, abs=0.01) and cause["share"] > 0.9
    lines = [
        line.strip() for line in printed if line.startswith(("gap ", "the engine samples with top_p", "Explained"))
    ]
    del cause["remedy"]
    evidence("doctor", command, {"printed": lines, **{key: found[key] for key in FIGURES}, "causes": [cause]})
