"""Patches that come and go within a training step, where the full checks of `applied` would cost a tenth of a second each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, reduce
from importlib import import_module

from mismatch_ext.patching.engine import PatchSet
from mismatch_ext.patching.patch import Patch


@contextmanager
def swapped(*patches: Patch) -> Iterator[None]:
    """Replace symbols for the time of a block; they are checked as `applied` checks them the first time only.

    Args:
        patches: Their targets are replaced where they are defined.

    Raises:
        PatchError: A version was not tested, or a symbol is not as it was when the patch was written.
    """
    _check(*patches)
    with ExitStack() as stack:
        for patch in patches:
            module, _, path = patch.target.partition(":")
            *outer, name = path.split(".")
            owner = reduce(getattr, outer, import_module(module))
            original = vars(owner)[name]
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, patch.make(original))
        yield


@cache
def _check(*patches: Patch) -> None:
    PatchSet(*patches).check()
