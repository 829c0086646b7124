"""Describe the patches of a run: a digest of each, and one digest of all of them."""

from __future__ import annotations

import hashlib
import inspect
import json
from types import FunctionType

from mismatch_ext.errors import PatchDriftError, PatchError
from mismatch_ext.patching.checks import Entry
from mismatch_ext.patching.patch import Patch
from mismatch_ext.patching.sources import qualified_name, source_digest

_PLAIN = (str, bytes, int, float, bool, type(None))


def describe(entries: list[Entry]) -> list[dict[str, str]]:
    """Return {"name", "target", "peer", "version", "digest"} of each entry, sorted by name."""
    rows = [
        {
            "name": entry.patch.name,
            "target": entry.patch.target,
            "peer": entry.patch.peer,
            "version": entry.version,
            "digest": _digest(entry),
        }
        for entry in entries
    ]
    return sorted(rows, key=lambda row: row["name"])


def digest_of(rows: list[dict[str, str]]) -> str:
    """SHA-256 over the digests of described patches, in order of their names; the same patches give the same digest."""
    return _sha256([row["digest"] for row in sorted(rows, key=lambda row: row["name"])])


def _sha256(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _digest(entry: Entry) -> str:
    patch = entry.patch
    try:
        upstream = source_digest(entry.slot.original)
    except PatchDriftError:
        upstream = "no source"  # a value or a built-in: the version stands for it
    return _sha256([patch.name, patch.peer, entry.version, patch.target, upstream, *_make_parts(patch)])


def _is_plain(value: object) -> bool:
    """Whether `repr` describes a value completely: it is a plain value, or a tuple of plain values."""
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _make_parts(patch: Patch) -> list[str]:
    """Source of `make`, the plain values that it closes over, and the name of its handler."""
    try:
        parts = [source_digest(patch.make)]
    except PatchDriftError as error:
        raise PatchError(
            f"{patch.name}: the digest needs the source of make: {error} Define make as a function in a file."
        ) from error
    captured = inspect.getclosurevars(patch.make).nonlocals if isinstance(patch.make, FunctionType) else {}
    for name, value in sorted(captured.items()):
        if not _is_plain(value):
            raise PatchError(
                f"{patch.name}: make closes over {name!r}, a {type(value).__name__}, which the digest cannot "
                "describe. Close over plain values, use module-level names, or take it as the handler."
            )
        parts.append(f"{name}={value!r}")
    return parts if patch.handler is None else [*parts, f"handler {qualified_name(patch.handler)}"]
