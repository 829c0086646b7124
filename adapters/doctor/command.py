"""`mismatch-ext doctor`: print the table, write doctor.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.doctor.examining import examine, examine_logged
from mismatch_ext.adapters.doctor.hosts import RESPONSES, HostRun
from mismatch_ext.adapters.doctor.options import DTYPES, asked_of, ensure_no_turns
from mismatch_ext.adapters.doctor.prompts import read_prompts
from mismatch_ext.adapters.doctor.server import SEEDS, Server, connect
from mismatch_ext.adapters.doctor.sides import Run
from mismatch_ext.adapters.doctor.turns import run_turns

from mismatch_ext.errors import ConfigError, MismatchError, RunDirectoryError
from mismatch_ext.files import write_whole
from mismatch_ext.terminal import say


def run(arguments: argparse.Namespace) -> int:
    """Print the table and write doctor.json; the exit status is 0 for clean, 1 for explained, 3 for an unexplained gap."""
    if arguments.turns is not None:
        return run_turns(arguments)
    ensure_no_turns(arguments)
    host = host_of(arguments)
    asked = asked_of(arguments, host)
    sides = asked.run
    if not sides.model:
        return _by_log_alone(arguments)
    from mismatch_ext.adapters.transformers.doctor.models import ensure_checkpoint

    from mismatch_ext.doctor import read_rollouts, report

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
        sides, said = as_logged(sides, arguments, logged.settings, host)
        stated = dict(logged.settings)
        if logged.kept is not None:
            sides = as_kept(sides, arguments, logged.kept.trainer, host)
            stated["host"] = logged.kept.trainer.get("host", "loop")
        diagnosis = examine_logged(sides, logged, **how)
        diagnosis.notes += said
        diagnosis = diagnosis.for_hosts(hosts_of_log(sides, arguments, stated))
    else:
        prompts = prompts_of(arguments, host, sides.model)
        _writable(arguments.out)
        longest = 0 if host is None else host.max_tokens
        limits = {"responses": arguments.responses, "max_tokens": asked.max_tokens, "longest": longest}
        # Who asks for a length gets that length alone, and a verdict that says so.
        limits["far"] = not arguments.quick and arguments.max_tokens is None
        limits["shortened"] = arguments.quick and arguments.max_tokens is None
        if sides.server is not None:
            server = connect(sides.server)
            sides = _as_served(sides, arguments, server, host)
            server.ensure_fits(prompts[: arguments.responses or RESPONSES], asked.max_tokens, sides.sampling)
        diagnosis = examine(sides, prompts, **limits, **how)
    if not arguments.json:
        say(report(diagnosis))
    settings = {"max_tokens": asked.max_tokens, "origin": dict(asked.origin), "left_out": dict(asked.left_out)}
    written = {"run": asdict(sides), "settings": settings, **diagnosis.data()}
    text = json.dumps(written, indent=1)
    write_whole(arguments.out / "doctor.json", (text + "\n").encode())
    say(text if arguments.json else str(arguments.out / "doctor.json"))
    _say_page(arguments.out, error=arguments.json)
    return diagnosis.exit_status(arguments.threshold)


def _by_log_alone(arguments: argparse.Namespace) -> int:
    """Say what `--rollouts` tell without a model; the exit status is 0 if every token is within the threshold, otherwise 3."""
    from mismatch_ext.doctor import read_rollouts
    from mismatch_ext.doctor.at_first import first_answer

    answer = first_answer(read_rollouts(arguments.rollouts, arguments.weight_version), arguments.threshold)
    _writable(arguments.out)
    text = json.dumps(answer.data(), indent=1)
    write_whole(arguments.out / "doctor.json", (text + "\n").encode())
    say(text if arguments.json else answer.report(arguments.rollouts, arguments.weight_version))
    if not arguments.json:
        say(str(arguments.out / "doctor.json"))
    # Also because a page of an earlier answer would stay.
    _say_page(arguments.out, error=arguments.json)
    return 0 if answer.agrees else 3


def _as_served(sides: Run, arguments: argparse.Namespace, server: Server, host: HostRun | None) -> Run:
    """Return the run with the seed under the server's name for it, and with the dtype that the server reports, if any."""
    sides = replace(sides, engine=server.kind, sampling={SEEDS[server.kind]: arguments.seed, **sides.sampling})
    dtype = server.dtype
    if dtype is None:
        return sides
    if arguments.dtype not in (None, dtype):
        raise ConfigError(
            f"--dtype: {arguments.dtype}, and the server says that it computes in {dtype}; leave --dtype out, and give the "
            "trainer's by --trainer-dtype if that is another."
        )
    return _in_dtype(sides, arguments, dtype, host)


def as_logged(
    sides: Run, arguments: argparse.Namespace, stated: Mapping[str, Any], host: HostRun | None
) -> tuple[Run, tuple[str, ...]]:
    """Return the run with the dtype and the temperature that its log states, unless given, and a note on the temperature."""
    if arguments.dtype is None and stated.get("dtype") in DTYPES:
        sides = _in_dtype(sides, arguments, stated["dtype"], host)
    heat = stated.get("temperature")
    if heat is None:
        return sides, ()
    if arguments.temperature is None and host is None:
        if heat == 0:
            said = "the log was sampled at temperature 0, at which no trainer scores; the trainer is scored at 1"
            return sides, (f"{said}; --temperature gives another",)
        said = (
            f"the trainer is scored at temperature {heat:g}, the log's, as RL trainers do; --temperature gives another"
        )
        return replace(sides, temperature=float(heat)), (said,)
    if heat == sides.temperature:
        return sides, ()
    whose = "the run's" if arguments.temperature is None else "by --temperature"
    said = f"the trainer is scored at temperature {sides.temperature:g}, {whose}; the log was sampled at {heat:g}"
    return sides, (said,)


def as_kept(sides: Run, arguments: argparse.Namespace, trainer: Mapping[str, Any], host: HostRun | None) -> Run:
    """Return the run with its trainer as a run has described it in its evidence; options and a host's file go first."""
    if host is not None:
        return sides
    changes: dict[str, Any] = {}
    for option, field, key in (
        ("trainer_dtype", "trainer_dtype", "dtype"),
        ("temperature", "temperature", "temperature"),
        ("trainer_head", "head", "head"),
        ("trainer_attention", "attention", "attention"),
        (None, "trainer_weights", "weights"),
        (None, "replays", "replays"),
    ):
        given = option is not None and getattr(arguments, option) is not None
        if key in trainer and not given:
            changes[field] = trainer[key]
    return replace(sides, **changes)


def hosts_of_log(sides: Run, arguments: argparse.Namespace, stated: Mapping[str, Any]) -> tuple[str, ...]:
    """Return whose lines to change are of use to who gives a log: those of the named host, or of a loop of one's own."""
    if arguments.trl is not None or arguments.verl is not None:
        return ("verl" if arguments.trl is None else "trl", sides.engine)
    engines = (stated["engine"],) if stated.get("engine") in SEEDS else tuple(SEEDS)
    return (*engines, stated.get("host", "loop"))


def _in_dtype(sides: Run, arguments: argparse.Namespace, dtype: str, host: HostRun | None) -> Run:
    """Return the run with the dtype that its server or its log states, which is the trainer's too if nothing else is known."""
    others = dtype if host is None else sides.trainer_dtype
    return replace(sides, dtype=dtype, trainer_dtype=arguments.trainer_dtype or others)


def _say_page(out: Path, *, error: bool) -> None:
    """Write report.html beside doctor.json, and print its path, or why it cannot be written; this does not end the command."""
    from mismatch_ext.report import build_why

    try:
        say(str(build_why(out)), keep="", error=error)
    except MismatchError as failure:
        say(f"no report: {failure}", error=True)


def host_of(arguments: argparse.Namespace) -> HostRun | None:
    """Read the host's configuration that `--trl` or `--verl` names; None if neither option is given.

    Raises:
        ConfigError: The configuration cannot be read, or asks for something that the doctor cannot start; names the setting.
    """
    checkpoint = None if arguments.model is None else str(arguments.model)
    if arguments.trl is not None:
        from mismatch_ext.adapters.trl.doctor import read_trl

        return read_trl(arguments.trl, checkpoint, served=arguments.server is not None)
    if arguments.verl is not None:
        from mismatch_ext.adapters.verl.doctor import read_verl

        return read_verl(arguments.verl, checkpoint)
    return None


def prompts_of(arguments: argparse.Namespace, host: HostRun | None, model: str) -> list[list[int]]:
    """Return the prompts that options name, otherwise those of the host's data set."""
    from mismatch_ext.adapters.doctor.datasets import read_dataset, with_own

    if arguments.prompts is not None:
        return read_prompts(arguments.prompts, model)
    configured = None if host is None else host.dataset
    dataset = configured if arguments.dataset is None else with_own(configured, arguments.dataset)
    assert dataset is not None  # refused before
    return read_dataset(dataset, model, arguments.responses or RESPONSES)


def _writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"--out: {out} cannot be written: {error.strerror or error}.") from error
