"""Settings of all tests: a busy machine is no failure."""

from __future__ import annotations

import os

from hypothesis import settings

# verl would load this package into the test process, where its patches are others' to test; runs of verl set this themselves.
os.environ.setdefault("VERL_USE_EXTERNAL_PLUGINS", "none")

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
