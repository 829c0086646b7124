"""The fixture `evidence` keeps what a test measured, once all of the test has passed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.evidence.compare import compared
from tests.evidence.machine import ROOT, provenance

# Another folder, for the tests of this fixture.
FOLDER = Path(os.environ.get("MISMATCH_EVIDENCE_DIR", ROOT / "evidence"))
PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember whether the test itself passed, for the fixture's end."""
    report = yield
    if call.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Return `evidence(name, figures, *, command=None)`, which writes evidence/NAME.json when the test has passed.

    `name` is the file's and the heading's on docs/evidence.md, where the first line of the test's docstring is the claim.
    `figures` are numbers, texts, and dictionaries of them; an interval is a dictionary with `value`, `low` and `high`.
    `command` is what a reader types to measure the same.
    """
    kept: dict[str, dict[str, Any]] = {}
    start = time.time()

    def keep(name: str, figures: dict[str, Any], *, command: str | None = None) -> None:
        claim = (request.function.__doc__ or "").strip().partition("\n")[0]
        assert claim, f"{request.node.nodeid} needs a docstring whose first line is the claim"
        assert name.isidentifier() and name not in kept, f"evidence {name!r} must be a new identifier"
        assert figures, f"evidence {name!r} has no figures"
        test = request.node.nodeid.partition("[")[0]
        kept[name] = {"name": name, "claim": claim, "test": test, "command": command, "figures": figures}

    yield keep
    if not request.node.stash.get(PASSED, False):
        return
    seconds = round(time.time() - start)
    for name, record in kept.items():
        record |= {"seconds": seconds, **provenance()}
        path = FOLDER / f"{name}.json"
        apart: list[str] = []
        if path.exists():
            moved, apart = compared(json.loads(path.read_text(encoding="utf-8")), record)
            print(*moved, sep="\n")
        # Where what is measured has changed, the old file goes first: that is to be seen in review.
        assert not apart, "\n".join([f"figures are not those recorded; to record anew remove {path}:", *apart])
        # Text first: a figure that is not finite is an error, and leaves the old file.
        text = json.dumps(
            record,
            indent=1,
            allow_nan=False,
            ensure_ascii=False,
        )
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
