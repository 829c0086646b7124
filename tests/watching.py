"""Alarms over several logs: the rules of a section, and the state between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_ext.alarms import Alarm, AlarmState, rules_of, watch
from mismatch_ext.config import MonitorConfig
from mismatch_ext.names import HostNames


class Watching:
    """Watches the logs of one run."""

    def __init__(self, monitor: MonitorConfig, names: HostNames | None = None) -> None:
        self.rules = rules_of(monitor, names)
        self.state = AlarmState()

    def observe(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        self.state, alarms = watch(self.state, metrics, self.rules, step)
        return alarms
