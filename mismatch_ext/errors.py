"""Every exception this package raises.

    MismatchError
    ├── ConfigError (ValueError)              the `mismatch:` block is wrong
    ├── RecordError (ValueError)              a rollout, batch or metric input is malformed
    │   ├── ProvenanceError                   provenance missing, mixed or inconsistent
    │   └── NonFiniteLogprobError             NaN or infinity in an unmasked position
    ├── RoutingError (ValueError)             a routing trace is malformed, or does not fit model or tokens
    │   └── ReplayError (RuntimeError)        routing cannot be recorded or replayed in this model
    ├── PeerVersionError (ImportError)        a peer is missing or outside the supported range
    ├── SeamError (ImportError)               a part of a peer that a feature needs is gone or has changed
    ├── PatchError (RuntimeError)             a monkey-patch cannot be applied or reverted
    │   ├── PatchDriftError                   the upstream symbol is gone or does something else
    │   ├── PatchConflictError                somebody else patched the symbol
    │   └── PatchVerificationError            the patch is not in place, or without effect
    ├── PrecisionError (RuntimeError)         a precision that was asked for is not possible
    │   ├── PrecisionAuditError               the dtypes read back differ from those asked for
    │   ├── LossScaleError                    the loss scaler is off, or overflows without end
    │   └── ReadinessError                    the checkpoint does not fit the asked dtype
    ├── WeightSyncError (RuntimeError)        the engine holds stale or garbled weights
    ├── EngineError (RuntimeError)            the rollout engine failed
    ├── LoopError (RuntimeError)              a training loop of your own does not follow its block
    └── RunDirectoryError (OSError)           the run directory cannot be read or written

Each leaf also inherits the closest standard exception, so that `except ValueError` works as expected. All take
one message argument, which keeps them picklable across worker processes.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping


class MismatchError(Exception):
    """Root of the exception tree."""


class ConfigError(MismatchError, ValueError):
    """The `mismatch:` block has an unknown key, a value out of range or an impossible combination."""


class RecordError(MismatchError, ValueError):
    """A rollout record, a batch or a metric input is malformed."""


class ProvenanceError(RecordError):
    """Provenance is missing, mixed within a batch, or contradicts what the trainer expects."""


class NonFiniteLogprobError(RecordError):
    """A log-probability in an unmasked position is NaN or infinite."""


class RoutingError(MismatchError, ValueError):
    """A routing trace is malformed, or does not fit the model or the tokens of its replay."""


class ReplayError(RoutingError, RuntimeError):
    """Routing cannot be recorded or replayed in this model, or a forward pass did not go through its routers."""


class PeerVersionError(MismatchError, ImportError):
    """A peer package is not installed or its version is outside the supported range."""


class SeamError(MismatchError, ImportError):
    """A part of a peer that a feature depends on is gone or has changed."""


class UntestedVersionWarning(UserWarning):
    """A peer's version was not run with this release; the parts of the peer that we depend on are checked, nothing else."""


class PatchError(MismatchError, RuntimeError):
    """A patch could not be applied or reverted; nothing was left half-applied."""


class PatchDriftError(PatchError):
    """The upstream symbol is gone, or does not do what the patch needs."""


class PatchConflictError(PatchError):
    """Another patch, or somebody else's, is on the symbol."""


class PatchVerificationError(PatchError):
    """The patch is not in place, or what it changes was not used."""


class PrecisionError(MismatchError, RuntimeError):
    """A precision that was asked for is not possible."""


class PrecisionAuditError(PrecisionError):
    """The dtypes read back from trainer and engine differ from what was asked for."""


class LossScaleError(PrecisionError):
    """The loss scaler is inactive, or gradients overflowed in too many steps in a row."""


class ReadinessError(PrecisionError):
    """The checkpoint's weights or activations do not fit the asked dtype."""


class WeightSyncError(MismatchError, RuntimeError):
    """After a weight update the engine holds stale or garbled weights."""


class EngineError(MismatchError, RuntimeError):
    """The rollout engine failed during generation or weight update, or runs with settings that the trainer cannot match."""


class LoopError(MismatchError, RuntimeError):
    """A training loop of your own did not use what its block asks for, or used it in the wrong order."""


class RunDirectoryError(MismatchError, OSError):
    """The run directory or its metrics file cannot be read or written."""


_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 30
_SHORT.maxstring = _SHORT.maxother = 300


def shown(value: object) -> str:
    """Return a value as text for messages: like `repr`, but with bounded length and depth."""
    return _SHORT.repr(value)


def suggestion(given: object, allowed: Iterable[object], meant: Mapping[str, str] | None = None) -> str:
    """Return " Did you mean 'x'?" with the nearest allowed name, or the one that an alias means; "" if none is near."""
    names = [str(name) for name in allowed]
    text = given if isinstance(given, str) else shown(given)
    lowered = text.strip().lower()
    alias = (meant or {}).get(lowered.removeprefix("torch."))
    near = [name for name in names if name == alias or name.lower() == lowered]
    near = near or difflib.get_close_matches(text, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
