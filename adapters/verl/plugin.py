"""Loading: what happens when verl imports this package, in the driver and in every process that it starts.

verl swallows a plugin that fails to load, with a message at DEBUG, and would train without the block. So a failure is printed on
standard error, and the driver refuses to start Ray for a configuration with a block. Other processes need no check: verl itself
imports our trainer there (`VERL_USE_EXTERNAL_MODULES`), and the trainer's configuration names our classes.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_ext.errors import ConfigError

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
    """Patch the two functions that verl's driver calls with its configuration; loading twice is harmless."""
    from mismatch_ext.patches.verl.validate_config import GUARD, VALIDATE_CONFIG

    try:
        _load()
    except Exception as error:
        message = f"mismatch-ext could not be loaded into verl: {type(error).__name__}: {error}"
        print(message, file=sys.stderr, flush=True)
        refuse = partial(_refuse, message)
        # Both: a program that has started Ray itself calls the first alone.
        _put(VALIDATE_CONFIG.calling(refuse), GUARD.calling(refuse))
        raise


def unload() -> None:
    """Take the patches out of this process again; what verl has built with it stays as it is."""
    _put()


def _load() -> None:
    # All imports are here, so that one that fails is a failure to load like any other.
    from mismatch_ext.patches.verl.validate_config import GUARD, VALIDATE_CONFIG

    from mismatch_ext.versions import require

    require("verl")
    _put(VALIDATE_CONFIG.calling(_prepare), GUARD.calling(_refuse_unprepared))


def _prepare(config: Any) -> dict[str, Any]:
    # Imported late, because it imports parts of verl that are not loaded yet while verl imports this package.
    from mismatch_ext.adapters.verl.config import prepare

    return prepare(config)


def _refuse_unprepared(config: Any) -> None:
    """Refuse to start Ray unless verl's check of the configuration has read the block, and this very block."""
    from mismatch_ext.adapters.verl.block import check_unedited, handed_on

    if not handed_on(config):
        raise ConfigError(
            f"the program {Path(sys.argv[0]).name} starts Ray without verl's validate_config, where the mismatch block is read, "
            "and would train without it. Start verl.trainer.main_ppo, or call verl.utils.config.validate_config before run_ppo."
        )
    check_unedited(config)


def _refuse(message: str, config: Any) -> Any:
    raise SystemExit(f"{message}\nThis run asks for a mismatch block; nothing was started.")
