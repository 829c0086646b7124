"""`mismatch-ext doctor --turns`: why conversations in a log fork; prints a table, writes turns.json and a page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.doctor.options import pairs

from mismatch_ext.chains.examining import examine
from mismatch_ext.chains.logs import read_conversations
from mismatch_ext.chains.text import report
from mismatch_ext.chains.turns import TURNS_FILE
from mismatch_ext.doctor.log_formats import PARQUET, objects_of
from mismatch_ext.errors import ConfigError, MismatchError, PeerVersionError, RunDirectoryError
from mismatch_ext.files import write_whole
from mismatch_ext.report import build_why
from mismatch_ext.terminal import say

# Options that mean something without --turns alone, with their values if they are not given.
OTHERS: tuple[tuple[str, Any], ...] = (
    ("trl", None),
    ("verl", None),
    ("dtype", None),
    ("trainer_dtype", None),
    ("trainer_layout", None),
    ("trainer_head", None),
    ("trainer_attention", None),
    ("temperature", None),
    ("engine", None),
    ("engine_arg", []),
    ("engine_model", None),
    ("sampling", []),
    ("older", []),
    ("server", None),
    ("weight_version", None),
    ("quick", False),
)


def run_turns(arguments: argparse.Namespace) -> int:
    """Print the table and write turns.json; the exit status is 0 without a break, 1 if all have a cause, otherwise 3."""
    for name, default in OTHERS:
        if getattr(arguments, name) != default:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is for engines and trainers; with --turns only a log is read. Leave it out.")
    folder = arguments.tokenizer or arguments.model
    if folder is None:
        raise ConfigError("--turns needs the run's tokenizer and chat template. Give their folder by --tokenizer.")
    from mismatch_ext.adapters.transformers.chat import load_chat

    chat = load_chat(folder, arguments.chat_template)
    settings = pairs("--template-arg", arguments.template_arg)
    conversations, notes = read_conversations(_lines(arguments.turns), chat, settings=settings)
    chains = examine(conversations, chat, notes)
    text = json.dumps(chains.data(), indent=1)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"--out: {arguments.out} cannot be written: {error.strerror or error}.") from error
    write_whole(arguments.out / TURNS_FILE, (text + "\n").encode())
    if arguments.json:
        say(text)
    else:
        say(report(chains))
        say(str(arguments.out / TURNS_FILE), keep="")
    try:
        say(str(build_why(arguments.out)), keep="", error=arguments.json)
    except MismatchError as failure:
        say(f"no report: {failure}", error=True)
    return chains.status


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a log, each with its place; TRL's log_completions writes parquet."""
    try:
        with path.open("rb") as file:
            start = file.read(len(PARQUET))
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror or error}.") from error
    if start != PARQUET:
        for where, content, _ in objects_of(path):
            yield where, content
        return
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise PeerVersionError(
            f"{path} is parquet, and pyarrow is not installed. Install it, or give JSON lines."
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise RunDirectoryError(f"{path} is parquet that cannot be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row
