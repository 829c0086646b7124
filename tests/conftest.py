"""Settings of all tests: a busy machine is no failure; what they cost is known, and said at the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.costs import Costs

# verl would load this package into the test process, where its patches are others' to test; runs of verl set this themselves.
os.environ.setdefault("VERL_USE_EXTERNAL_PLUGINS", "none")

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that measures what tests cost."""
    parser.addoption("--write-costs", action="store_true", help="write what each test took to tests/costs.json")


def pytest_configure(config: pytest.Config) -> None:
    """Let tests be grouped and ordered by their costs, and let no build hang them that was killed in an earlier run."""
    config.pluginmanager.register(Costs(config))
    if not hasattr(config, "workerinput"):  # before xdist's processes, whose own locks are in use
        for lock in (Path(sys.prefix) / "torch_extensions").glob("*/lock"):
            lock.unlink(missing_ok=True)
