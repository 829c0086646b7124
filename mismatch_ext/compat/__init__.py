"""Which features work with the peers that are installed: declared seams, probed without importing the peers."""

from mismatch_ext.compat.claims import Both, Default, Either, Has, Known, Says, Takes
from mismatch_ext.compat.seam import Finding, Seam, examine, refuse_changed
from mismatch_ext.compat.source import Gone, Sources

__all__ = [
    "Both",
    "Default",
    "Either",
    "Finding",
    "Gone",
    "Has",
    "Known",
    "Says",
    "Seam",
    "Sources",
    "Takes",
    "examine",
    "refuse_changed",
]
