"""The `mismatch-ext` command with the subcommands that need a peer."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence

from mismatch_ext.cli import DEMO, REPORT, Command, folder, run_command
from mismatch_ext.errors import ConfigError, suggestion
from mismatch_ext.terminal import say


def _configure_readiness(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_dir", metavar="MODEL_DIR", type=folder, help="folder of the checkpoint and its tokenizer"
    )
    parser.add_argument("--dtype", default="float16", help="compute dtype in question (default: float16)")
    parser.add_argument(
        "--prompt", metavar="TEXT", action="append", default=[], help="sample text for the activations; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def _readiness(arguments: argparse.Namespace) -> int:
    """Print the scan and its verdict; the exit status is 1 when the checkpoint is not ready."""
    from mismatch_ext.adapters.transformers import scan_checkpoint

    from mismatch_ext.precision.dtypes import MEANT, NAMES

    if arguments.dtype not in NAMES:
        hint = suggestion(arguments.dtype, NAMES, MEANT)
        raise ConfigError(f"--dtype: {arguments.dtype!r} is not allowed; allowed: {', '.join(NAMES)}.{hint}")
    report = scan_checkpoint(arguments.model_dir, arguments.prompt, arguments.dtype)
    say(json.dumps(report.to_dict(), indent=2) if arguments.json else str(report))
    return 1 if report.verdict == "not ready" else 0


def _configure_compat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--import",
        action="store_true",
        dest="importing",
        help="import the peers and check names too, in about half a minute",
    )
    parser.add_argument(
        "--verl",
        metavar="ARGUMENTS",
        nargs=argparse.REMAINDER,
        help="make the checks of verl's driver for these arguments of main_ppo, without Ray; comes last",
    )


def _compat(arguments: argparse.Namespace) -> int:
    """Print which features work with the installed peers (status 0), or what verl's driver refuses (status 1)."""
    if arguments.verl is not None:
        from mismatch_ext.adapters.doctor.verl_dry_run import dry_run

        arguments.json |= "--json" in arguments.verl
        found = dry_run([word for word in arguments.verl if word != "--json"])
        say(json.dumps(found.to_dict(), indent=2) if arguments.json else str(found))
        return found.status
    from mismatch_ext.adapters.compat import installed_environment

    from mismatch_ext.seams import table

    environment = installed_environment(importing=arguments.importing)
    say(json.dumps(environment, indent=2) if arguments.json else table(environment))
    return 0


def _configure_doctor(parser: argparse.ArgumentParser) -> None:
    from mismatch_ext.adapters.doctor.options import configure

    configure(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    """Print why the two sides differ; the exit status is 0 for clean, 1 for explained, 2 for an error, otherwise 3."""
    from mismatch_ext.adapters.doctor.command import run

    return run(arguments)


def _configure_gate(parser: argparse.ArgumentParser) -> None:
    from mismatch_ext.adapters.doctor.gate import configure

    configure(parser)


def _gate(arguments: argparse.Namespace) -> int:
    """Print the table that admits a model; the exit status is 0 if every figure keeps its limit, 1 if not, 2 for an error."""
    from mismatch_ext.adapters.doctor.gate import run

    return run(arguments)


def _configure_trl(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verbose", action="store_true", help="print versions and patches when the run starts")
    parser.add_argument("script", choices=["grpo"], help="TRL's script to run")
    parser.add_argument(
        "rest", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="its arguments, for example --config FILE"
    )


def _trl(arguments: argparse.Namespace) -> int:
    """Run TRL's script with our trainer."""
    from mismatch_ext.adapters.trl.grpo import main as grpo

    if arguments.verbose:
        logging.getLogger("mismatch_ext").setLevel(logging.INFO)
    grpo(arguments.rest)
    return 0


COMMANDS = (
    DEMO,
    REPORT,
    Command(
        name="doctor",
        help="Say why engine and trainer differ, how much each cause weighs, and what to change.",
        configure=_configure_doctor,
        run=_doctor,
    ),
    Command(
        name="gate",
        help="Say whether an engine and a trainer agree on a model, as a table for a pull request and an exit status.",
        configure=_configure_gate,
        run=_gate,
    ),
    Command(
        name="readiness",
        help="Scan a checkpoint's weights and activations for what does not fit a dtype.",
        configure=_configure_readiness,
        run=_readiness,
    ),
    Command(
        name="trl",
        help="Run TRL's own grpo script with a mismatch block in its YAML file.",
        configure=_configure_trl,
        run=_trl,
    ),
    Command(
        name="compat",
        help="Say which installed trainers and engines this release was run with, and which features work with them.",
        configure=_configure_compat,
        run=_compat,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    platforms = logging.getLogger("verl.plugin.platform.platform_manager")
    platforms.addFilter(_says_more)
    try:
        return run_command(COMMANDS, argv)
    finally:
        platforms.removeFilter(_says_more)


def _says_more(record: logging.LogRecord) -> bool:
    """Leave out the two warnings of verl that it found no GPU, on which no command here depends."""
    return not str(record.msg).startswith(("No supported accelerator detected", "Platform '"))
