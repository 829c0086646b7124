"""Thresholds that turn metrics into alarms."""

from mismatch_ext.monitor.alarms import ANEW, Alarm, Monitor
from mismatch_ext.monitor.defaults import DEFAULTS, DefaultRule
from mismatch_ext.monitor.rules import Rule, resolve

__all__ = ["ANEW", "DEFAULTS", "Alarm", "DefaultRule", "Monitor", "Rule", "resolve"]
