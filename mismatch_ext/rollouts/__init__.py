"""Reads rollout files that hosts have logged, for `mismatch-ext doctor --rollouts`; one module per format."""

from mismatch_ext.rollouts.logged import Logged, LoggedResponse, LoggedRoutes
from mismatch_ext.rollouts.own import write_rollouts
from mismatch_ext.rollouts.reading import read_rollouts

__all__ = ["Logged", "LoggedResponse", "LoggedRoutes", "read_rollouts", "write_rollouts"]
