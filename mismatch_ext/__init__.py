"""Prove that your RL trainer and your rollout engine compute the same policy, and close the gap when they don't."""

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import MismatchError
from mismatch_ext.versions import installed

__version__ = "0.1.0"

__all__ = ["MismatchConfig", "MismatchError", "__version__", "installed"]
