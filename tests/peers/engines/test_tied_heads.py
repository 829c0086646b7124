"""A CPU engine's output head after weight updates: tied to the embeddings in four families, padded, and untied as a control."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.engines.scenarios_tied_heads")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]

MODELS = {
    "llama": ("llama", 320, True),
    "llama, vocabulary padded to 384": ("llama", 333, True),
    "qwen3": ("qwen3", 320, True),
    "gemma": ("gemma", 320, True),
    "gemma3": ("gemma3", 320, True),
    "untied llama": ("llama", 320, False),
}
DTYPES = {name: ("float32",) for name in MODELS} | {"llama": ("float32", "bfloat16", "float16")}


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in MODELS for dtype in DTYPES[name]])
def test_an_update_reaches_the_output_head(run: Run, tmp_path: Path, name: str, dtype: str) -> None:
    kind, vocabulary, tied = MODELS[name]
    found = run(scenarios.updated, out=str(tmp_path), kind=kind, vocabulary=vocabulary, tied=tied, dtype=dtype).expect()
    fresh, *after = found["looks"]
    # An update moves the policy by 0.4 to 0.6 nats, and rounding grows with the logits by less than threefold.
    assert all(look["gap"] < 10 * fresh["gap"] for look in after), found
    assert all(look["head is its weights"] == [True] for look in found["looks"]), found


def test_an_update_over_http_reaches_the_output_head(run: Run, tmp_path: Path) -> None:
    found = run(
        scenarios.updated,
        out=str(tmp_path),
        kind="llama",
        vocabulary=320,
        tied=True,
        dtype="float32",
        way="to a server",
    ).expect()
    fresh, *after = found["looks"]
    assert all(look["gap"] < 10 * fresh["gap"] and look["head is its weights"] == [True] for look in after), found


def test_a_head_that_an_update_has_missed_is_seen(run: Run, tmp_path: Path) -> None:
    found = run(
        scenarios.updated, out=str(tmp_path), kind="llama", vocabulary=320, tied=True, dtype="float32", way="reload"
    ).expect()
    fresh, *after = found["looks"]
    is_stale = [look["gap"] > 10 * fresh["gap"] for look in after]
    assert [look["head is its weights"] for look in after] == [[not stale] for stale in is_stale], found
    assert all(is_stale), "vLLM packs tied heads again: `repack_tied_heads` can go"
