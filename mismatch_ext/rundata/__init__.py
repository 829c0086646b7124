"""Reads a run directory, and holds the data that was read."""

from mismatch_ext.rundata.data import EventRecord, ProfileRecord, RunData, StepRecord
from mismatch_ext.rundata.lines import parse_line
from mismatch_ext.rundata.reading import METRICS_FILE, RUN_FOLDER, find_runs, read_run

__all__ = [
    "METRICS_FILE",
    "RUN_FOLDER",
    "EventRecord",
    "ProfileRecord",
    "RunData",
    "StepRecord",
    "find_runs",
    "parse_line",
    "read_run",
]
