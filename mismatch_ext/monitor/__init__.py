"""Thresholds that turn metrics into alarms, and the summary at the end of a run."""

from mismatch_ext.monitor.alarms import ANEW, Alarm, Monitor
from mismatch_ext.monitor.closing import closing_lines
from mismatch_ext.monitor.defaults import DEFAULTS, DefaultRule
from mismatch_ext.monitor.rules import Rule, resolve

__all__ = ["ANEW", "DEFAULTS", "Alarm", "DefaultRule", "Monitor", "Rule", "closing_lines", "resolve"]
