"""Claims about a peer's source. A claim that does not hold says what was found instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mismatch_ext.compat.source import Gone, Sources


class Claim(Protocol):
    """Something that must be true of a peer's source; `str(claim)` says what."""

    def check(self, sources: Sources) -> str | None:
        """Return None when the claim holds, otherwise a sentence that says what was found instead.

        Raises:
            Gone: The thing that the claim is about does not exist.
        """


@dataclass(frozen=True)
class Has:
    """A class, function, field or attribute exists.

    Args:
        target: "package.module:Attribute.path".
    """

    target: str

    def __str__(self) -> str:
        return f"`{self.target}`"

    def check(self, sources: Sources) -> str | None:
        """See `Claim`."""
        sources.find(self.target)
        return None


@dataclass(frozen=True, init=False)
class Takes:
    """A function has these parameters.

    Args:
        target: The function.
        names: Its parameters.
        first: Whether they must be its first parameters, in this order.
    """

    target: str
    names: tuple[str, ...]
    first: bool

    def __init__(self, target: str, *names: str, first: bool = False) -> None:
        for key, value in (("target", target), ("names", names), ("first", first)):
            object.__setattr__(self, key, value)

    def __str__(self) -> str:
        return f"`{self.target}({', '.join(self.names)}{', ...' if self.first else ''})`"

    def check(self, sources: Sources) -> str | None:
        """See `Claim`."""
        found = tuple(sources.find(self.target).parameters)
        held = found[: len(self.names)] == self.names if self.first else set(self.names) <= set(found)
        return None if held else f"{self.target} takes ({', '.join(found)}), not {', '.join(self.names)}."


@dataclass(frozen=True)
class Default:
    """A field, or a function's parameter, has this default.

    Args:
        target: The field, or the function.
        value: Source text of the default.
        parameter: The parameter; None for a field.
    """

    target: str
    value: str
    parameter: str | None = None

    def __str__(self) -> str:
        where = f"`{self.target}`" if self.parameter is None else f"`{self.parameter}` of `{self.target}`"
        return f"the default `{self.value}` of {where}"

    def check(self, sources: Sources) -> str | None:
        """See `Claim`."""
        definition = sources.find(self.target)
        if self.parameter is None:
            found = definition.value
        else:
            parameters = definition.parameters
            if self.parameter not in parameters:
                raise Gone(f"{self.target} has no parameter {self.parameter}.")
            found = parameters[self.parameter]
        return (
            None
            if found == self.value
            else f"the default of {self.parameter or self.target} is {found}, not {self.value}."
        )


@dataclass(frozen=True, eq=False)
class Known:
    """A function's source is one of those that were read and run.

    Args:
        target: The function.
        digests: Maps each known digest to the versions that have this source.
    """

    target: str
    digests: Mapping[str, str]

    def __str__(self) -> str:
        return f"the source of `{self.target}` ({', '.join(self.digests.values())})"

    def check(self, sources: Sources) -> str | None:
        """See `Claim`."""
        found = sources.find(self.target).digest
        if found in self.digests:
            return None
        return f"the source of {self.target} has digest {found}; known are those of {', '.join(self.digests.values())}."


@dataclass(frozen=True)
class Says:
    """The source of a function, class or module contains a pattern.

    Args:
        target: The function or class, or a module without ":".
        pattern: Regular expression.
    """

    target: str
    pattern: str

    def __str__(self) -> str:
        return f"`{self.pattern}` in the source of `{self.target}`"

    def check(self, sources: Sources) -> str | None:
        """See `Claim`."""
        named = ":" in self.target
        text = sources.find(self.target).text if named else sources.module(self.target).text
        return None if re.search(self.pattern, text) else f"the source of {self.target} no longer has {self.pattern!r}."


@dataclass(frozen=True, init=False)
class Either:
    """At least one of several claims holds: for example, upstream moved something, and both places are known.

    Args:
        claims: The claims.
    """

    claims: tuple[Claim, ...]

    def __init__(self, *claims: Claim) -> None:
        object.__setattr__(self, "claims", claims)

    def __str__(self) -> str:
        return " or ".join(map(str, self.claims))

    def check(self, sources: Sources) -> str | None:
        """See `Claim`."""
        found = []
        for claim in self.claims:
            change = changed(claim, sources)
            if change is None:
                return None
            found.append(change)
        return " ".join(found)


@dataclass(frozen=True, init=False)
class Both:
    """All of several claims hold; used as one alternative of `Either`.

    Args:
        claims: The claims.
    """

    claims: tuple[Claim, ...]

    def __init__(self, *claims: Claim) -> None:
        object.__setattr__(self, "claims", claims)

    def __str__(self) -> str:
        return " with ".join(map(str, self.claims))

    def check(self, sources: Sources) -> str | None:
        """See `Claim`."""
        return " ".join(change for claim in self.claims if (change := changed(claim, sources)) is not None) or None


def changed(claim: Claim, sources: Sources) -> str | None:
    """Return None when a claim holds, otherwise what was found instead, also when nothing is there."""
    try:
        return claim.check(sources)
    except Gone as gone:
        return str(gone)
