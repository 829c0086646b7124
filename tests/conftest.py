"""Settings of all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# verl would load this package into the test process, where its patches are others' to test; runs of verl set this themselves.
os.environ.setdefault("VERL_USE_EXTERNAL_PLUGINS", "none")
# Each engine would compile what counts ranks of log-probabilities for some seconds, and examine this machine to report its use.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")

# A busy machine is no failure.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_configure(config: pytest.Config) -> None:
    """Remove the locks of builds that were killed in an earlier run, which would hang this one."""
    if not hasattr(config, "workerinput"):  # before xdist's processes, whose own locks are in use
        for lock in (Path(sys.prefix) / "torch_extensions").glob("*/lock"):
            lock.unlink(missing_ok=True)
