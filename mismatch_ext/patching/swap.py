"""Patches that come and go within a training step.

All checks of `applied` take a tenth of a second. Here they run when a patch is first used, and again only after its symbol has
become another object. In between, the replacement built by then is only written and taken away.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Generic, TypeVar

from mismatch_ext.errors import PatchConflictError
from mismatch_ext.patching import provenance
from mismatch_ext.patching.checks import LIVE, Entry, build, plan, prepare
from mismatch_ext.patching.engine import LOCK, describe_lost, undo, verify, write
from mismatch_ext.patching.patch import Patch

_ORDER = threading.RLock()  # blocks may begin and end in several threads
_KEPT: dict[str, Entry] = {}
_USERS: Counter[str] = Counter()
F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def swapped(*patches: Patch) -> Iterator[None]:
    """Put patches in place for the time of a block, as part of a training step.

    All threads share the symbols, and their blocks may end in any order. So a patch is put in place for the first block and
    taken away after the last. A patch that is applied already stays applied.

    Args:
        patches: Patches with different names.

    Raises:
        PatchError: As in `applied`, before the block; or after it, if other code replaced a symbol meanwhile.
    """
    entries = _enter(patches)
    try:
        yield
    finally:
        _leave(entries)


class Given(Generic[F]):
    """Functions that a patch's replacement calls, each for the time of a block."""

    def __init__(self) -> None:
        self._open: list[F] = []

    @property
    def last(self) -> F | None:
        """The function of the last block that is open; None where none is."""
        return self._open[-1] if self._open else None

    @contextmanager
    def during(self, function: F, patch: Patch) -> Iterator[None]:
        """Give a function, and put the patch in place, for the time of a block.

        Raises:
            PatchError: As `swapped`.
        """
        self._open.append(function)
        try:
            with swapped(patch):
                yield
        finally:
            self._open.remove(function)


def described(*patches: Patch) -> list[dict[str, str]]:
    """Check patches that will be swapped, and describe them as `PatchSet.describe` does.

    Raises:
        PatchError: As in `applied`.
    """
    with _ORDER:
        return provenance.describe(_ready(patches))


def _ready(patches: tuple[Patch, ...]) -> list[Entry]:
    """Return a checked and built entry for each patch: the one in place, or the one kept, or a new one."""
    entries = {patch.name: entry for patch in patches if (entry := _in_place(patch) or _kept(patch)) is not None}
    rest = tuple(patch for patch in patches if patch.name not in entries)
    if rest:
        versions = prepare(rest)
        with LOCK:
            new = plan(rest, versions)
            build(new)
        _KEPT.update({entry.patch.name: entry for entry in new})
    return [entries.get(patch.name) or _KEPT[patch.name] for patch in patches]


def _in_place(patch: Patch) -> Entry | None:
    live = LIVE.get(patch.name)
    return live if live is not None and live.patch == patch and live.in_place else None


def _kept(patch: Patch) -> Entry | None:
    """Return the entry of an earlier block, if the symbol has not changed since that entry was checked."""
    entry = _KEPT.get(patch.name)
    if entry is None or entry.patch != patch or patch.name in LIVE:
        return None
    module, _, path = patch.target.partition(":")
    owner: object = import_module(module)
    for name in path.split(".")[:-1]:
        owner = getattr(owner, name, None)
    return entry if owner is entry.slot.owner and entry.slot.current_entry() is entry.slot.entry else None


def _enter(patches: tuple[Patch, ...]) -> list[Entry]:
    with _ORDER:
        before = list(_KEPT.values())
        entries = _ready(patches)
        with LOCK:
            started: list[Entry] = []
            try:
                for entry in entries:
                    if LIVE.get(entry.patch.name) is not entry:
                        started.append(entry)
                        write(entry)
                verify([entry for entry in started if entry not in before])
            except BaseException:
                undo(started)
                raise
        # Do not count patches that other code has applied for longer than this block.
        mine = [entry for entry in entries if _KEPT.get(entry.patch.name) is entry]
        _USERS.update(entry.patch.name for entry in mine)
        return mine


def _leave(entries: list[Entry]) -> None:
    with _ORDER, LOCK:
        _USERS.subtract(entry.patch.name for entry in entries)
        lost = undo([entry for entry in entries if not _USERS[entry.patch.name]])
    if lost:
        raise PatchConflictError(" ".join(map(describe_lost, lost)))
