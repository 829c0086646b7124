"""Loading: what happens when verl imports this package, in the driver and in every process that it starts.

verl swallows a plugin that fails to load, with a message at DEBUG, and would train without the block. So a failure is printed on
standard error, and the driver refuses to run a configuration with a block. Workers need no check of their own, because the class
that Ray starts there is this package's, and cannot be loaded either.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mismatch_ext.patching import Patch

_applied: tuple[Patch, ...] = ()  # in verl's functions, in this process


def _put(*patches: Patch) -> None:
    """Replace the patches that are in place by these."""
    from mismatch_ext.patching import apply, revert, verify

    global _applied
    if _applied == patches:
        verify(*patches)
        return
    reverted, _applied = _applied, ()
    revert(*reverted)
    apply(*patches)
    _applied = patches


def load() -> None:
    """Patch verl in this process and, in a process of a run with a block, register the trainer; loading twice is harmless.

    Raises:
        MismatchError: This verl is too old, or a function that is patched differs from the one that was run.
        SystemExit: The same, in a driver whose command line asks for a block.
    """
    try:
        _load()
    except Exception as error:
        message = f"mismatch-ext could not be loaded into verl: {type(error).__name__}: {error}"
        print(message, file=sys.stderr, flush=True)
        message += "\nThis run asks for a mismatch block; nothing was started."
        if asked_for(sys.argv[1:]):
            raise SystemExit(message) from error
        from mismatch_ext.patches.verl.validate_config import NOT_LOADED

        # The block may be in a file that no argument names: verl's check of its configuration is the next place that sees it.
        _put(NOT_LOADED.calling(NotLoaded(message)))
        raise


def unload() -> None:
    """Take the patches out of this process again; what verl has built with it stays as it is."""
    _put()
    if "mismatch_ext.adapters.verl.rollout.replicas" in sys.modules:
        sys.modules["mismatch_ext.adapters.verl.rollout.replicas"].restore_replicas()


def _load() -> None:
    # All imports are here, so that one that fails is a failure to load like any other.
    from mismatch_ext.adapters.verl.block import active_block
    from mismatch_ext.patches.verl.validate_config import RUNTIME_ENV, VALIDATE_CONFIG

    from mismatch_ext.versions import require

    require("verl")
    _put(VALIDATE_CONFIG.calling(_prepare), RUNTIME_ENV.calling(_refuse_unprepared))
    if (block := active_block()) is not None:
        # In the process of verl's TaskRunner the trainer is looked up by its name.
        import mismatch_ext.adapters.verl.driver.modes  # noqa: F401
        from mismatch_ext.adapters.verl.rollout.replicas import register_replicas

        register_replicas(block)


def _prepare(config: Any) -> dict[str, Any]:
    # Imported late, because it imports parts of verl that are not loaded yet while verl imports this package.
    from mismatch_ext.adapters.verl.settings.prepare import prepare

    return prepare(config)


def _refuse_unprepared(config: Any) -> None:
    from mismatch_ext.adapters.verl.settings.prepare import refuse_unprepared

    refuse_unprepared(config)


@dataclass(frozen=True)
class NotLoaded:
    """Ends a driver that has a block.

    Args:
        message: The message to end with, which says why this package is not loaded.
    """

    message: str

    def __call__(self, config: Any) -> None:
        """Raise SystemExit."""
        raise SystemExit(self.message)


def asked_for(arguments: list[str]) -> bool:
    """Tell whether a Hydra command line has a `mismatch` block, as `+mismatch.routing.mode=R3` or `+mismatch=default`."""
    return any(
        argument.lstrip("+").startswith(("mismatch.", "mismatch=", "mismatch@"))
        for argument in arguments
        if not argument.startswith(("-", "~"))
    )
