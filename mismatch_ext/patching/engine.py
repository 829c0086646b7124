"""Apply sets of patches, all or nothing, and revert them exactly.

- Every check of every patch, and every `make`, runs before the first write. The order of patches in a set
  does not matter: each wraps what was there before the set was applied.
- One symbol takes one patch. The engine refuses a second patch, in the same set or in another applied set, even if the second
  would reach the symbol through inheritance.
- If other code replaced a symbol after us, the engine leaves it as it is, reports it, and still reverts all other symbols.
- It is an error if a loaded module holds the stock symbol by value before applying, or the replacement after reverting.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from mismatch_ext.errors import PatchConflictError, PatchError, PatchVerificationError
from mismatch_ext.patching import provenance
from mismatch_ext.patching.aliases import find_holders
from mismatch_ext.patching.checks import LIVE, Entry, build, plan, prepare
from mismatch_ext.patching.patch import MARKER, Patch
from mismatch_ext.patching.symbols import MISSING, is_mutable_class, locate

LOCK = threading.RLock()
"""Held while symbols are looked up, written and restored; never while modules are imported, because that takes other locks."""


class PatchSet:
    """Patches that are applied and reverted together.

    Args:
        patches: Patches with different names.

    Raises:
        PatchConflictError: Two patches have the same name.
    """

    def __init__(self, *patches: Patch) -> None:
        names = [patch.name for patch in patches]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PatchConflictError(f"Patches listed more than once in one set: {', '.join(twice)}.")
        self.patches = patches
        self._entries: list[Entry] = []
        self._applied = False

    def check(self) -> None:
        """Run the checks that `apply` runs before it calls a `make`; imports the targets, writes nothing."""
        versions = prepare(self.patches)
        with LOCK:
            plan(self.patches, versions)

    def apply(self) -> PatchSet:
        """Apply every patch, or none.

        Raises:
            PatchVersionError: A peer is missing or outside a patch's range.
            PatchDriftError: A symbol is gone or its source changed.
            PatchConflictError: A symbol is patched already or held by value elsewhere.
            PatchVerificationError: A patch has no effect.
            PatchError: A `make` failed, or a symbol cannot be written.
        """
        versions = prepare(self.patches)
        with LOCK:
            if self._applied:
                raise PatchConflictError(f"This set is applied already: {self._names}.")
            entries = plan(self.patches, versions)
            build(entries)
            started: list[Entry] = []
            try:
                for entry in entries:
                    started.append(entry)
                    write(entry)
                verify(entries)
            except BaseException as error:
                self._entries = undo(started)
                self._applied = bool(self._entries)
                for lost in self._entries:
                    error.add_note(describe_lost(lost))
                raise
            self._entries, self._applied = entries, True
        return self

    def revert(self) -> None:
        """Restore every symbol, in reverse order; has no effect when the set is not applied.

        Raises:
            PatchConflictError: Other code replaced a symbol after us, so that it was left alone; or a module imported a
                replacement by value and keeps it. Every other symbol is restored first. A symbol that was left alone counts as
                patched until a later `revert` finds our replacement there again.
        """
        with LOCK:
            entries = self._entries
            lost = undo(entries)
            self._entries, self._applied = lost, bool(lost)
            problems = [describe_lost(entry) for entry in lost]
            problems += _left_behind([entry for entry in entries if entry not in lost])
        if problems:
            raise PatchConflictError(" ".join(problems))

    def verify(self) -> None:
        """Check again that every patch is in place and does its work; may be called at any time while the set is applied.

        Raises:
            PatchError: The set is not applied, or was reverted in part.
            PatchVerificationError: A patch is no longer in place, or its own check fails.
        """
        with LOCK:
            if not self._applied or len(self._entries) != len(self.patches):
                raise PatchError(f"These patches are not all applied: {self._names}.")
            verify(self._entries)

    @property
    def active(self) -> bool:
        """True while every patch is applied and every replacement is still where it was put."""
        with LOCK:
            complete = self._applied and len(self._entries) == len(self.patches)
            return complete and all(entry.in_place for entry in self._entries)

    @property
    def digest(self) -> str:
        """SHA-256 over the patches' digests in order of their names; processes with the same patches have the same digest.

        Raises:
            PatchError: As `describe`.
        """
        return provenance.digest_of(self.describe())

    def describe(self) -> list[dict[str, str]]:
        """Return {"name", "target", "peer", "version", "digest"} of each patch, sorted by name.

        The digest covers the patch's name, the peer's version, the target, the upstream source and the source
        of `make` with the plain values it closes over. It does not cover helpers that `make` calls.

        Raises:
            PatchError: The set is not active, or the source of a `make` cannot be read.
        """
        with LOCK:
            if not self.active:
                raise PatchError(f"These patches are not active, so they have no digest: {self._names}.")
            return provenance.describe(self._entries)

    @property
    def _names(self) -> str:
        return ", ".join(patch.name for patch in self.patches) or "(empty set)"


@contextlib.contextmanager
def applied(*patches: Patch) -> Iterator[PatchSet]:
    """Apply patches for the duration of a block, and revert them at its end, also when the block raises.

    If the block raised and the revert fails too, the block's exception is the `__context__` of the revert's exception.

    Args:
        patches: Patches with different names.

    Raises:
        PatchError: As `PatchSet.apply` and `PatchSet.revert`.
    """
    patch_set = PatchSet(*patches).apply()
    try:
        yield patch_set
    finally:
        patch_set.revert()


def active_patches() -> list[dict[str, str]]:
    """Describe every patch that any set has applied in this process, sorted by name.

    Raises:
        PatchConflictError: Other code replaced a patched symbol.
    """
    with LOCK:
        lost = [describe_lost(entry) for entry in LIVE.values() if not entry.in_place]
        if lost:
            raise PatchConflictError(" ".join(lost))
        return provenance.describe(list(LIVE.values()))


def write(entry: Entry) -> None:
    """Put a replacement into its slot, and its entry into `LIVE`."""
    slot = entry.slot
    if slot.current_entry() is not slot.entry:
        raise PatchConflictError(f"{entry.context}: {slot.target} was changed while it was being patched.")
    if isinstance(entry.replacement, FunctionType) and isinstance(slot.original, FunctionType):
        if not hasattr(entry.replacement, "__wrapped__"):
            functools.update_wrapper(entry.replacement, slot.original)  # hosts read names and signatures
    if _carries_marker(entry.replacement):
        entry.previous_marker = vars(entry.replacement).get(MARKER, MISSING)
        setattr(entry.replacement, MARKER, entry.patch.name)
    try:
        setattr(slot.owner, slot.attribute, entry.new_entry)
    except (AttributeError, TypeError) as error:
        raise PatchError(f"{entry.context}: {slot.target} cannot be written: {error}.") from error
    LIVE[entry.patch.name] = entry


def _carries_marker(value: Any) -> bool:
    """Whether a replacement carries the marker: functions and mutable classes do, others are recognised by identity."""
    return isinstance(value, FunctionType) or is_mutable_class(value)


def verify(entries: list[Entry]) -> None:
    """Look up every target again, then run the patches' own checks."""
    for entry in entries:
        slot = entry.slot
        fresh = locate(slot.target, entry.context)
        marked = not _carries_marker(entry.replacement) or vars(entry.replacement)[MARKER] == entry.patch.name
        if fresh.entry is not entry.new_entry or not marked:
            raise PatchVerificationError(
                f"{entry.context}: {slot.target} does not resolve to the replacement. Another patch or a "
                "reload changed it or one of its parents."
            )
    for entry in entries:
        if entry.patch.verify is None:
            continue
        try:
            result = entry.patch.verify()
        except Exception as error:
            raise PatchVerificationError(f"{entry.context}: verify raised {error!r}.") from error
        if result is not None and not result:
            raise PatchVerificationError(f"{entry.context}: verify returned {result!r}: it has no effect.")


def undo(entries: list[Entry]) -> list[Entry]:
    """Restore raw entries in reverse order; return, in their order, the entries that other code changed and that were left."""
    lost = []
    for entry in reversed(entries):
        slot = entry.slot
        if not entry.in_place:
            if LIVE.get(entry.patch.name) is entry:
                lost.append(entry)
                continue
            # A failing apply stopped at this entry and never wrote it.
        elif slot.entry is MISSING:
            delattr(slot.owner, slot.attribute)
        else:
            setattr(slot.owner, slot.attribute, slot.entry)
        LIVE.pop(entry.patch.name, None)
        _remove_marker(entry)
    return lost[::-1]


def _remove_marker(entry: Entry) -> None:
    if not _carries_marker(entry.replacement) or vars(entry.replacement).get(MARKER) != entry.patch.name:
        return
    if entry.previous_marker is MISSING:
        delattr(entry.replacement, MARKER)
    else:
        setattr(entry.replacement, MARKER, entry.previous_marker)


def describe_lost(entry: Entry) -> str:
    return (
        f"{entry.context}: {entry.slot.target} was changed by somebody else after it was patched; it was "
        "left as it is and may still call the replacement."
    )


def _left_behind(entries: list[Entry]) -> list[str]:
    """Name the modules that took a replacement by value while it was applied."""
    importable = [entry for entry in entries if entry.importable]
    found = find_holders([entry.replacement for entry in importable])
    problems = []
    for entry in importable:
        names = [holder.name for holder in found[id(entry.replacement)] if holder.name not in entry.own_names]
        names = entry.not_allowed(names)
        if names:
            problems.append(
                f"{entry.context}: {entry.slot.target} was restored, but {', '.join(names)} imported the "
                "replacement by value and keeps it. Import these modules outside the patched block, or keep "
                "the patch for the life of the process."
            )
    return problems
