"""Render what a run recorded as one HTML file that a person can read and pass on."""

from mismatch_ext.report.closing import closing_lines
from mismatch_ext.report.page import Report, build, build_why
from mismatch_ext.report.summary import Row, Summary, load_runs, summarize
from mismatch_ext.report.verdict import RunVerdict, judge, level_of, verdict

__all__ = [
    "Report",
    "Row",
    "RunVerdict",
    "Summary",
    "build",
    "build_why",
    "closing_lines",
    "judge",
    "level_of",
    "load_runs",
    "summarize",
    "verdict",
]
