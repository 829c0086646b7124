"""The fixture `evidence` writes down what README and docs quote."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness import measured_on
from tests.commands import ROOT


@pytest.fixture
def evidence() -> Callable[[str, str, dict[str, Any]], None]:
    """Return `evidence(name, command, figures)`, which writes evidence/NAME.json; call it after the test's last assertion."""

    def write(name: str, command: str, figures: dict[str, Any]) -> None:
        record = {"command": command, **measured_on(), "figures": figures}
        (ROOT / f"evidence/{name}.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")

    return write
