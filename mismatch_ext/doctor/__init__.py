"""Finds why an engine and a trainer differ on the same tokens: the parts of the gap, the causes that fit, and what to change."""

from mismatch_ext.doctor.causes import Cause, Fit
from mismatch_ext.doctor.diagnosing import diagnose, rescored
from mismatch_ext.doctor.diagnosis import Diagnosis, NamedCause, Scores
from mismatch_ext.doctor.remedies import REMEDIES, Remedy, remedy
from mismatch_ext.doctor.sample import Sample
from mismatch_ext.doctor.text import report

__all__ = [
    "REMEDIES",
    "Cause",
    "Diagnosis",
    "Fit",
    "NamedCause",
    "Remedy",
    "Sample",
    "Scores",
    "diagnose",
    "remedy",
    "report",
    "rescored",
]
