"""Models and a runner for the tests that only some stacks need; `make test` does not run them."""

from __future__ import annotations

from tests.peers.conftest import dense, moe, run

__all__ = ["dense", "moe", "run"]
