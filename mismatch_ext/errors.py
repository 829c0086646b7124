"""Every exception that this package raises, and the two functions that word their messages.

A message says what was found, what is allowed, and what to do. Each class is also the closest standard exception, so that
`except ValueError` works, and takes one argument, so that it can be pickled.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager


class MismatchError(Exception):
    """Root of the exceptions that this package raises. Each message says what was found, what is allowed, and what to do."""


class ConfigError(MismatchError, ValueError):
    """The `mismatch:` block has an unknown key, a value out of range or an impossible combination."""


class RecordError(MismatchError, ValueError):
    """A rollout, its provenance, a batch, a metric or a saved state is malformed or inconsistent."""


class NonFiniteLogprobError(RecordError):
    """A log-probability in an unmasked position is NaN or infinite."""


class RoutingError(MismatchError, ValueError):
    """A routing trace is malformed, or does not fit the model or the tokens of its replay."""


class ReplayError(RoutingError, RuntimeError):
    """Routing cannot be recorded or replayed in this model, or a forward pass did not go through its routers."""


class PeerVersionError(MismatchError, ImportError):
    """A trainer or engine is not installed, or its version is outside the supported range."""


class SeamError(MismatchError, ImportError):
    """A part of a trainer or engine that a feature depends on is gone or has changed."""


class UntestedVersionWarning(UserWarning):
    """Nobody has run this version of a trainer or engine with this release."""


class PatchError(MismatchError, RuntimeError):
    """A patch could not be applied or reverted, or is not in effect; nothing was left half-applied."""


class PatchDriftError(PatchError):
    """The upstream symbol is gone or its source differs from what the patch was written for."""


class PrecisionError(MismatchError, RuntimeError):
    """A precision that was asked for is not possible, is not what both sides compute in, or overflows without end."""


class WeightSyncError(MismatchError, RuntimeError):
    """After a weight update the engine holds stale or corrupted weights."""


class EngineError(MismatchError, RuntimeError):
    """The rollout engine failed, or runs with settings that the trainer cannot match."""


class OtherRankError(RuntimeError):
    """Another rank failed with an error that is not one of this package's, so that no rank may go on."""


class LoopError(MismatchError, RuntimeError):
    """A training loop of your own did not use what its block asks for, or used it in the wrong order."""


class RunDirectoryError(MismatchError, OSError):
    """The run directory or its metrics file cannot be read or written."""


@contextmanager
def asking_engine(what: str) -> Iterator[None]:
    """Turn an error of an engine's own call into an `EngineError`; `what` says what it was asked to do.

    Put nothing but that call into the block, so that a bug of ours is not taken for a failure of the engine.
    """
    try:
        yield
    except MismatchError:
        raise
    except Exception as error:
        raise EngineError(f"the engine failed to {what}: {type(error).__name__}: {error}") from error


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
