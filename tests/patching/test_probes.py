"""A patch on a symbol that is not what it was: a probe says so before anything is written, whatever the version says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from mismatch_ext.errors import PatchDriftError, PatchVersionError
from mismatch_ext.patching import PatchSet, applied, current_digest
from mismatch_ext.versions import PEERS, Peer


def two_words(original: Any) -> str | None:
    """Say what is wrong with a function that is no `greet(name)`."""
    found = tuple(inspect.signature(original).parameters)
    return None if found == ("name",) else f"it takes {found}."


@pytest.fixture
def open_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(name="upst", distributions=("upst",), ran=("1.0", "1.1"), open=True, extra="up")
    monkeypatch.setitem(PEERS, "upst", peer)


def test_a_probe_that_finds_a_change_refuses_and_nothing_is_written(upstream: Any) -> None:
    before = upstream.snapshot()
    patch = upstream.patch("upst.core:remembered", probe=two_words)
    with pytest.raises(PatchDriftError) as refusal:
        PatchSet(patch).apply()
    assert "upst.core:remembered is not what the patch was written for: it takes ()." in str(refusal.value)
    assert str(refusal.value).endswith("Nothing was patched.")
    upstream.assert_same(before)


def test_a_probe_that_holds_lets_a_version_beyond_the_range_be_patched_where_the_peer_is_open(
    upstream: Any, open_peer: None
) -> None:
    with applied(upstream.patch("upst.core:greet", supports=">=1.0,<=1.1", probe=two_words)):
        assert upstream.core.greet("me") == "!stock me"
    known = {current_digest("upst.core:greet"): "1.1"}
    with applied(upstream.patch("upst.core:greet", supports=">=1.0,<=1.1", source_digests=known)):
        assert upstream.core.greet("me") == "!stock me"


def test_beyond_the_range_a_patch_without_probe_or_digest_is_refused(upstream: Any, open_peer: None) -> None:
    with pytest.raises(PatchVersionError, match=r"upst 1\.2\.0\+cpu is outside the supported range >=1\.0,<=1\.1"):
        PatchSet(upstream.patch("upst.core:greet", supports=">=1.0,<=1.1")).apply()
    for older in ("==1.3", ">=1.3,<=1.4", ">=1.0,<=1.3,!=1.2.0"):  # with a probe too: only what is newer may pass
        with pytest.raises(PatchVersionError):
            PatchSet(upstream.patch("upst.core:greet", supports=older, probe=two_words)).apply()
    other = {"0123456789abcdef": "1.1"}
    with pytest.raises(PatchDriftError):
        PatchSet(upstream.patch("upst.core:greet", supports=">=1.0,<=1.1", source_digests=other)).apply()


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "closed"])
def test_a_probe_opens_no_peer_that_is_closed(upstream: Any, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    if known:
        peer = Peer(name="upst", distributions=("upst",), ran=("1.0", "1.1"), open=False, extra="up")
        monkeypatch.setitem(PEERS, "upst", peer)
    with pytest.raises(PatchVersionError):
        PatchSet(upstream.patch("upst.core:greet", supports=">=1.0,<=1.1", probe=two_words)).apply()
