"""`mismatch-ext doctor`: sample with the engine, score with the trainer, name why they differ, and try the remedy."""

from mismatch_ext.adapters.doctor.command import run
from mismatch_ext.adapters.doctor.examining import examine, examine_logged
from mismatch_ext.adapters.doctor.options import configure
from mismatch_ext.adapters.doctor.sides import DoctorsEngine, Run

__all__ = ["DoctorsEngine", "Run", "configure", "examine", "examine_logged", "run"]
