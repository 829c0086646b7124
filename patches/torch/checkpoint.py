"""Tell torch's activation checkpoints, in both modes, whose function they will run again in the backward pass.

Both patches are in place only while a context is open, around single forward passes. torch uses the two symbols only inside their
own module.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Protocol

from torch.autograd import Function
from torch.utils import checkpoint as _checkpoint

from mismatch_ext.patching import Patch, swapped

Call = Callable[..., Any]

# Since torch 2.14 the older name is a plain function that torch itself no longer calls.
_OLDER = "_checkpoint_without_reentrant_generator"
_GENERATOR = f"{_OLDER}_impl" if hasattr(_checkpoint, f"{_OLDER}_impl") else _OLDER


class Binder(Protocol):
    """Knows the context that checkpointed functions belong to, if they are its own."""

    def bound(self, function: Call) -> Call:
        """Return a function that finds the context when it is run again, or the function itself if it is not its own."""

    def checkpointing(self) -> AbstractContextManager[None]:
        """Return the context in which such a function first runs."""


_BINDERS: list[Binder] = []  # one for each context that is open, in any thread


def _bound(function: Call) -> Call:
    for binder in tuple(_BINDERS):
        function = binder.bound(function)
    return function


def _reentrant(original: Any) -> Any:
    class CheckpointFunction(original):  # type: ignore[misc]
        @classmethod
        def apply(cls, function: Call, *args: Any) -> Any:
            return original.apply(_bound(function), *args)

    return CheckpointFunction


def _non_reentrant(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @wraps(original)
    def generator(function: Call, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # torch itself makes the first run, between this generator's two steps, with the function as it was.
        with ExitStack() as stack:
            for binder in tuple(_BINDERS):
                stack.enter_context(binder.checkpointing())
            yield from original(_bound(function), *args, **kwargs)

    return generator


def _probe_function(original: Any) -> str | None:
    """Say why this is not the autograd function whose first arguments are a function and `preserve_rng_state`, or return None."""
    if not (isinstance(original, type) and issubclass(original, Function)):
        return "it is no autograd Function."
    return _called(f"{original.__name__}.apply(") or _first_parameters(
        original.forward, ("ctx", "run_function", "preserve_rng_state")
    )


def _probe_generator(original: Any) -> str | None:
    """Say why this is not the generator that torch runs around its first argument, a checkpointed function, or return None."""
    if not inspect.isgeneratorfunction(original):
        return "it is no generator function any more, so torch does not step through it."
    return _called(f"{original.__name__}(") or _first_parameters(original, ("fn",))


def _called(call: str) -> str | None:
    """Say that torch's module does not contain a call, or return None; without the call, torch does not run the symbol."""
    source = inspect.getsource(_checkpoint)
    return (
        None
        if re.search(rf"(?<!def )\b{re.escape(call)}", source)
        else f"torch.utils.checkpoint does not call {call}...)."
    )


def _first_parameters(function: Call, expected: tuple[str, ...]) -> str | None:
    found = tuple(inspect.signature(function).parameters)[: len(expected)]
    return None if found == expected else f"its first parameters are {found}, not {expected}."


REENTRANT = Patch(
    name="torch/reentrant_checkpoint",
    peer="torch",
    supports=">=2.11.0,<=2.15.0",
    target="torch.utils.checkpoint:CheckpointFunction",
    make=_reentrant,
    probe=_probe_function,
    upstream="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py",
    reason="a layer that is computed again in the backward pass has to get the routes of its own forward pass.",
    not_covered="Checkpoints of another make (DeepSpeed's); a router that runs in one is refused in the forward pass.",
    remove_when="torch.utils.checkpoint has a hook on the function that it will run again.",
)
NON_REENTRANT = Patch(
    name="torch/non_reentrant_checkpoint",
    peer="torch",
    supports=">=2.11.0,<=2.15.0",
    target=f"torch.utils.checkpoint:{_GENERATOR}",
    make=_non_reentrant,
    probe=_probe_generator,
    upstream="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py",
    reason="as torch/reentrant_checkpoint, in the mode that saves no inputs through autograd.",
    not_covered="torch.distributed._composable.checkpoint, which holds the generator by value and is refused likewise.",
    remove_when="torch.utils.checkpoint has a hook on the function that it will run again.",
    allow_aliases=("torch.distributed._composable.checkpoint_activation",),
)

CHECKPOINTS = (REENTRANT, NON_REENTRANT)


@contextmanager
def checkpoints_bound(binder: Binder) -> Iterator[None]:
    """Wrap what torch.utils.checkpoint will run again, however `checkpoint` was imported.

    Args:
        binder: Wraps the functions that are checkpointed in the meantime.

    Raises:
        PatchError: This version of torch was not tested, or its functions are not as they were.
    """
    _BINDERS.append(binder)
    try:
        with swapped(*CHECKPOINTS):
            yield
    finally:
        _BINDERS.remove(binder)
