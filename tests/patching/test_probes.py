"""A patch on a symbol that is not what it was: a probe says so before anything is written, whatever the version says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.utils.checkpoint as upstream_checkpoint
from mismatch_ext.patches.torch.checkpoint import NON_REENTRANT, REENTRANT

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


# torch's own two symbols, as torch 2.14 changed one of them.


def _checkpoint_without_reentrant_generator(fn: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Any:
    """Stand for the shim that torch 2.14 left: same name, same parameters, and torch does not step through it."""
    return upstream_checkpoint, fn, args


def test_the_name_that_torch_left_behind_as_a_shim_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    name = NON_REENTRANT.target.partition(":")[2]
    monkeypatch.setattr(upstream_checkpoint, name, _checkpoint_without_reentrant_generator)
    with pytest.raises(PatchDriftError, match="it is no generator function any more"):
        PatchSet(NON_REENTRANT).check()


def test_a_generator_that_torch_does_not_call_is_found_out() -> None:
    def stepped(fn: Any) -> Any:
        yield fn

    class Left(torch_function()):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, run_function: Any, preserve_rng_state: Any) -> Any:
            return run_function

    assert NON_REENTRANT.probe is not None and REENTRANT.probe is not None
    assert NON_REENTRANT.probe(stepped) == "torch.utils.checkpoint does not call stepped(...)."
    assert REENTRANT.probe(Left) == "torch.utils.checkpoint does not call Left.apply(...)."
    assert REENTRANT.probe(int) == "it is no autograd Function."


def torch_function() -> type:
    """Return torch's base of functions with a gradient of their own."""
    found: type = upstream_checkpoint.CheckpointFunction.__mro__[1]
    return found


def test_what_torch_has_now_is_what_both_patches_were_written_for() -> None:
    PatchSet(REENTRANT, NON_REENTRANT).check()
