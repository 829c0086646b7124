"""The `mismatch-ext` command: a small registry of subcommands.

A subcommand takes the parsed arguments and returns the exit status, and is registered by `@command`. What
it needs beyond the standard library it imports itself, so that the others stay quick to start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mismatch_ext.errors import MismatchError
from mismatch_ext.terminal import say
from mismatch_ext.versions import installed

Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand: what it adds to its parser, and what it does."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Run


COMMANDS: dict[str, Command] = {}


def command(name: str, *, help: str, configure: Callable[[argparse.ArgumentParser], None]) -> Callable[[Run], Run]:
    """Register the decorated function as subcommand `name`."""

    def register(run: Run) -> Run:
        if name in COMMANDS:
            raise ValueError(f"subcommand {name!r} is registered twice.")
        COMMANDS[name] = Command(help=help, configure=configure, run=run)
        return run

    return register


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, or 2 for an error told in one line on stderr."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return COMMANDS[arguments.command].run(arguments)
    except MismatchError as error:
        say(f"error: {' '.join(str(error).split())}", error=True)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mismatch-ext",
        description="Tell how far rollout engine and trainer are apart.",
    )
    parser.add_argument("--version", action="version", version=f"mismatch-ext {installed('mismatch-ext')}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, entry in COMMANDS.items():
        entry.configure(subparsers.add_parser(name, help=entry.help, description=entry.help))
    return parser


def folder(text: str) -> Path:
    """Return the path that an argument names; a `~` in front is the home folder, also where the shell left it."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # nobody's home folder
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _configure_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=folder,
        help="folder that holds metrics.jsonl, or a folder of such folders, which are shown side by side",
    )
    parser.add_argument("--out", metavar="FILE", type=folder, help="file to write (default: RUN_DIR/report.html)")


@command("report", help="Render a run directory as one self-contained HTML file.", configure=_configure_report)
def report(arguments: argparse.Namespace) -> int:
    """Render the report and print its path and its verdict."""
    from mismatch_ext.report import build

    built = build(arguments.run_dir, arguments.out)
    say(str(built.path), keep="")
    say(built.verdict, keep="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
