"""Render what a run recorded as one HTML file that a person can read and pass on."""

from mismatch_ext.report.judging import RunVerdict, judge, judge_all
from mismatch_ext.report.levels import level_of
from mismatch_ext.report.page import Report, build, build_why
from mismatch_ext.report.sentences import verdict
from mismatch_ext.report.summary import Row, Summary, load_runs, summarize

__all__ = [
    "Report",
    "Row",
    "RunVerdict",
    "Summary",
    "build",
    "build_why",
    "judge",
    "judge_all",
    "level_of",
    "load_runs",
    "summarize",
    "verdict",
]
