"""`mismatch-ext doctor`: print the table, write doctor.json."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from mismatch_ext.adapters.doctor.examining import examine, examine_logged
from mismatch_ext.adapters.doctor.options import sides_of
from mismatch_ext.adapters.doctor.prompts import read_prompts
from mismatch_ext.adapters.doctor.server import connect
from mismatch_ext.adapters.doctor.sides import Run

from mismatch_ext.errors import ConfigError, RunDirectoryError
from mismatch_ext.terminal import say


def run(arguments: argparse.Namespace) -> int:
    """Print the table and write doctor.json; the exit status is 0 for clean, 1 for explained, 2 for an unexplained gap."""
    from mismatch_ext.adapters.transformers.doctor import ensure_checkpoint

    from mismatch_ext.doctor import report
    from mismatch_ext.rollouts import read_rollouts

    sides = sides_of(arguments)
    for option, path in (
        ("--model", sides.model),
        ("--engine-model", sides.engine_model),
        *(("--older", p) for p in sides.older),
    ):
        if path is not None:
            ensure_checkpoint(option, path)
    how = {"seed": arguments.seed, "quick": arguments.quick}
    if arguments.rollouts is not None:
        logged = read_rollouts(arguments.rollouts, arguments.weight_version)
        _writable(arguments.out)
        found = examine_logged(sides, logged, **how)
    else:
        prompts = read_prompts(arguments.prompts, sides.model)
        _writable(arguments.out)
        limits = {"responses": arguments.responses, "max_tokens": arguments.max_tokens}
        if sides.server is not None:
            server = connect(sides.server)
            server.ensure_fits(prompts[: arguments.responses], arguments.max_tokens, sides.sampling)
            sides = _as_served(sides, arguments, server.dtype)
        found = examine(sides, prompts, **limits, **how)
    say(report(found))
    try:
        written = {"run": asdict(sides), **found.data()}
        (arguments.out / "doctor.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(
            f"--out: doctor.json cannot be written to {arguments.out}: {error.strerror or error}."
        ) from error
    say(str(arguments.out / "doctor.json"), keep="")
    return found.exit_status(arguments.threshold)


def _as_served(sides: Run, arguments: argparse.Namespace, dtype: str | None) -> Run:
    """Return the run with the dtype that a server says, if it says one."""
    if dtype is None:
        return sides
    if arguments.dtype not in (None, dtype):
        raise ConfigError(
            f"--dtype: {arguments.dtype}, and the server says that it computes in {dtype}; leave --dtype out, and give the "
            "trainer's by --trainer-dtype if that is another."
        )
    return replace(sides, dtype=dtype, trainer_dtype=arguments.trainer_dtype or dtype)


def _writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"--out: {out} cannot be written: {error.strerror or error}.") from error
