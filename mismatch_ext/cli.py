"""The `mismatch-ext` command, with the subcommands that need no peer (`demo`, `report`); `adapters/cli.py` adds the others."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mismatch_ext.errors import MismatchError
from mismatch_ext.terminal import say
from mismatch_ext.versions import installed

MAX_PROBLEMS = 10
CLOSED = 128 + 13
"""Exit status of a program that SIGPIPE ends."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand; `configure` and `run` import what they need themselves, so that other subcommands start quickly."""

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def run_command(commands: Sequence[Command], argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: the subcommand's, or 2 after an error, one line on stderr.

    With `--json` the error is an object on stdout too.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    called = next((word for word in words if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="mismatch-ext", description="Tell how far rollout engine and trainer are apart."
    )
    parser.add_argument("--version", action="version", version=f"mismatch-ext {installed('mismatch-ext')}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in commands:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if command.name == called:
            command.configure(subparser)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return next(command.run(arguments) for command in commands if command.name == arguments.command)
    except MismatchError as error:
        message = " ".join(str(error).split())
        say(f"error: {message}", error=True)
        if getattr(arguments, "json", None) is True:  # `gate --json` takes a file
            say(json.dumps({"error": message}))
        return 2
    except BrokenPipeError:
        # Who reads our output has closed it, as `head` does; Python would flush to it once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED


def folder(text: str) -> Path:
    """Return the path that an argument names; a leading `~` is the home folder, also if the shell did not expand it."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # there is no such user
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _configure_report(parser: argparse.ArgumentParser) -> None:
    about = (
        "folder that holds metrics-*.jsonl, or a log without this package: trainer_state.json, verl's jsonl, TensorBoard's event "
        "files, W&B's CSV, console text; or a folder of such folders, which are shown side by side"
    )
    parser.add_argument("path", metavar="PATH", type=folder, help=about)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=folder,
        help="file to write (default: report.html in that folder, or the log's name with .html)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def _report(arguments: argparse.Namespace) -> int:
    """Render the report and print its path, its verdict and what of the logs could not be used."""
    from mismatch_ext.report import build

    built = build(arguments.path, arguments.out)
    if arguments.json:
        say(json.dumps(built.to_dict(), indent=2))
        return 0
    say(str(built.path), keep="")
    say(built.verdict, keep="")
    for problem in built.problems[:MAX_PROBLEMS]:
        say(problem, keep="")
    if (more := len(built.problems) - MAX_PROBLEMS) > 0:
        say(f"{more} more problems are in the report.")
    return 0


def _configure_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=folder,
        default=Path("runs/demo-miniature"),
        help="folder to write (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the policy and of what is sampled (default: 0)")


def _demo(arguments: argparse.Namespace) -> int:
    """Show the gap of a miniature policy, one planted fault and what the doctor says of it."""
    from mismatch_ext.demo import run

    run(arguments.out, arguments.seed)
    return 0


DEMO = Command(
    name="demo",
    help="Show a gap, its cause and the remedy on a miniature policy: under a minute, no GPU, no model.",
    configure=_configure_demo,
    run=_demo,
)
ABOUT_REPORT = "Render a run, or a log that TRL or verl wrote without this package, as one self-contained HTML file."
REPORT = Command(name="report", help=ABOUT_REPORT, configure=_configure_report, run=_report)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommands that need no peer."""
    return run_command([DEMO, REPORT], argv)


if __name__ == "__main__":
    sys.exit(main())
