"""What is said on a terminal: names of runs, folders and servers are others' to choose, and a terminal obeys what is in them."""

from __future__ import annotations

import sys
import unicodedata


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""Return a text in which no character steers a terminal or turns the order of others round: "\x1b[2J" comes out as typed.

    Args:
        text: Any text, of which parts may come from a file's name or a server.
        keep: Control characters that stay.
    """
    if text.isascii() and text.isprintable():
        return text
    # Controls, marks without a glyph (by which right-to-left text is begun), halves of a pair, separators of lines.
    steering = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(
        c if c in keep or unicodedata.category(c) not in steering else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def say(text: str, *, error: bool = False, keep: str = "\n\t") -> None:
    """Print a text at once, with "?" for characters that the terminal's encoding lacks.

    Args:
        text: What to say.
        error: Whether it goes to standard error.
        keep: Control characters that stay, as in `printable`.
    """
    stream = sys.stderr if error else sys.stdout
    encoding = stream.encoding or "utf-8"
    print(printable(text, keep=keep).encode(encoding, "replace").decode(encoding), file=stream, flush=True)
