"""Finds why an engine and a trainer differ on the same tokens: the parts of the gap, the causes that fit, and what to change."""

from mismatch_ext.doctor.causes import REMEDIES, Cause, Remedy, remedy
from mismatch_ext.doctor.diagnose import Diagnosis, conclude, diagnose
from mismatch_ext.doctor.evidence import Evidence, Scores, Tried, gather, rescored
from mismatch_ext.doctor.log_formats import read_rollouts, write_rollouts
from mismatch_ext.doctor.named import NamedCause
from mismatch_ext.doctor.sample import Sample
from mismatch_ext.doctor.text import report

__all__ = [
    "REMEDIES",
    "Cause",
    "Diagnosis",
    "Evidence",
    "NamedCause",
    "Remedy",
    "Sample",
    "Scores",
    "Tried",
    "conclude",
    "diagnose",
    "gather",
    "read_rollouts",
    "remedy",
    "report",
    "rescored",
    "write_rollouts",
]
