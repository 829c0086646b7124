"""Holds what a host's own KL terms were measured to be against the figures of docs/kl.md."""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracles.kl.hosts import HostTerm, read_terms

FIGURES = ("value", "responses", "cos", "tokens", "std")


def assert_documented(rows: list[dict[str, Any]], host: str, version: str) -> None:
    """Assert that a host's rows are those of the page, all of them and no others, to the last digit that it keeps."""
    found = {term.name: term for term in (HostTerm(**row) for row in rows)}
    documented = {term.name: term for term in read_terms() if (term.host, term.version) == (host, version)}
    hint = "run python -m tests.kl_hosts, and write what changed to docs/kl.md"
    assert found and found.keys() == documented.keys(), f"{host} {version}: {hint}"
    for name, term in found.items():
        page = documented[name]
        assert (term.default, term.regularizes) == (page.default, page.regularizes), f"{name}: {hint}"
        for figure in FIGURES:
            ours, theirs = getattr(term, figure), getattr(page, figure)
            assert (ours is None) == (theirs is None), (name, figure, hint)
            assert ours is None or ours == pytest.approx(theirs, rel=1e-5, abs=1e-8), (name, figure, hint)
