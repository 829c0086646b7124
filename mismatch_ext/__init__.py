"""Prove that your RL trainer and your rollout engine compute the same policy, and close the gap when they don't."""

from typing import TYPE_CHECKING, Any

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import MismatchError
from mismatch_ext.versions import installed

if TYPE_CHECKING:
    from mismatch_ext.loop import Run

__version__ = "0.1.0"

__all__ = ["MismatchConfig", "MismatchError", "Run", "__version__", "installed"]


def __getattr__(name: str) -> Any:
    # `Run` imports torch, which a command that reads a file does without.
    if name == "Run":
        from mismatch_ext.loop import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
