"""Apply and revert patches on other people's packages: check everything, apply, verify, revert exactly.

    check (versions, symbols, source digests, conflicts) → build replacements → write → verify → revert

Nothing is written before every check of every patch has passed, and a failure at any later point restores every symbol. This
package knows nothing about any trainer or engine; the patches are declared in `mismatch_ext.patches`.
"""

from __future__ import annotations

from mismatch_ext.patching.engine import PatchSet, active_patches, applied
from mismatch_ext.patching.patch import ANY_VERSION, MARKER, Patch
from mismatch_ext.patching.provenance import digest_of
from mismatch_ext.patching.sources import current_digest, source_digest
from mismatch_ext.patching.swap import Given, described, swapped

__all__ = [
    "ANY_VERSION",
    "Given",
    "MARKER",
    "Patch",
    "PatchSet",
    "active_patches",
    "applied",
    "current_digest",
    "described",
    "digest_of",
    "source_digest",
    "swapped",
]
