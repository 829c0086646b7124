"""Prints text safely: others choose the names of runs, folders and servers, and a terminal obeys control characters in them."""

from __future__ import annotations

import contextlib
import sys
import unicodedata


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""Return a text in which characters that steer a terminal or reverse text are escaped, as "\x1b"; those in `keep` stay."""
    if text.isascii() and text.isprintable():
        return text
    # Controls, format marks (which start right-to-left text, for example), surrogates, line and paragraph separators.
    steering = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(
        c if c in keep or unicodedata.category(c) not in steering else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def say(text: str, *, error: bool = False, keep: str = "\n\t") -> None:
    """Print a text (`error`: to standard error) and flush it, with "?" for characters that the terminal's encoding lacks.

    Raises OSError or ValueError if the stream cannot be written, so that a command does not look as if it had printed everything.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # a process without a terminal
        return
    encoding = stream.encoding or "utf-8"
    print(printable(text, keep=keep).encode(encoding, "replace").decode(encoding), file=stream, flush=True)


def say_in_run(text: str) -> None:
    """Print a text as `say` does while something trains: on a full disk or a closed pipe it is lost, and the run goes on."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        say(text)
