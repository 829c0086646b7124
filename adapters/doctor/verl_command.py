"""Reads what starts a run of verl: arguments of `main_ppo`, a pasted command, or a launch script. Nothing in it is run."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mismatch_ext.errors import ConfigError

MAIN = re.compile(r"(^|[./])main_ppo(\.py)?$")
"""The word of a command that starts verl."""
ENDS = frozenset({"&&", "||", "|", "&", ";", ">", ">>", "2>&1", "&>"})
"""Words that end its arguments."""
ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=(\((?:[^)]*)\)|\S.*|)$", re.M)
ARRAY = re.compile(r"\$\{(\w+)\[@\]\}")
NAMED = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")


def arguments_of(words: Sequence[str]) -> argparse.Namespace:
    """Return the overrides, `config_path` and `config_name` that words hold; raises ConfigError.

    The words are arguments of `main_ppo`, with or without the command in front of them, or begin with the path of a script that
    has such a command.
    """
    given = list(words)
    if given and given[0].endswith(".sh"):
        given = [*_of_script(Path(given[0]).expanduser()), *given[1:]]
    else:
        given = _behind_main(given) or given
    parser = argparse.ArgumentParser(prog="mismatch-ext compat --verl", add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-path", "-cp", default="config")
    parser.add_argument("--config-name", "-cn", default="ppo_trainer")
    return parser.parse_intermixed_args(given)


def _behind_main(words: Sequence[str]) -> list[str] | None:
    """Return the words between the one that starts verl and the end of its command; None without such a word."""
    start = next((number for number, word in enumerate(words, start=1) if MAIN.search(word)), None)
    if start is None:
        return None
    end = next((number for number, word in enumerate(words) if number >= start and word in ENDS), len(words))
    return list(words[start:end])


def _of_script(path: Path) -> list[str]:
    """Return the arguments of `main_ppo` in a script, with the values of variables that it assigns or the shell has."""
    try:
        text = path.read_text(encoding="utf-8")
        # What a command would print is unknown; it is mostly a name.
        text = re.sub(r"\$\([^()]*\)|`[^`]*`", "unknown", text.replace("\\\n", " "))
        values: dict[str, str] = dict(os.environ)
        arrays: dict[str, list[str]] = {}
        for name, value in ASSIGNED.findall(text):
            if value.startswith("("):
                arrays[name] = shlex.split(value[1:-1], comments=True)
            else:
                values[name] = _expanded(" ".join(shlex.split(value, comments=True)[:1]), values)
        for line in text.splitlines():
            if "main_ppo" in line and (words := _behind_main(shlex.split(line, comments=True))) is not None:
                every = [word for given in words for word in _of_array(given, arrays)]
                return [_expanded(word, values) for word in every if word not in ("$@", "$*")]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--verl: {path} cannot be read: {error}. Give the arguments of main_ppo themselves."
        ) from error
    raise ConfigError(f"--verl: {path} has no command that starts verl's main_ppo; give the arguments themselves.")


def _of_array(word: str, arrays: Mapping[str, list[str]]) -> list[str]:
    match = ARRAY.fullmatch(word)
    return [word] if match is None else arrays.get(match[1], [])


def _expanded(word: str, values: Mapping[str, str]) -> str:
    return NAMED.sub(lambda match: values.get(match[1] or match[2]) or match[3] or "", word)


def composed(words: Sequence[str]) -> Any:
    """Compose verl's configuration as `main_ppo` does with these words; raises ConfigError if Hydra refuses them."""
    try:
        import verl.trainer
    except ModuleNotFoundError as error:
        raise ConfigError(f"--verl: {error}. Run this where verl is installed.") from error
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    given = arguments_of(words)
    folder = Path(
        verl.trainer.__path__[0], given.config_path
    ).resolve()  # as Hydra's main, below the module that calls it
    try:
        with initialize_config_dir(version_base=None, config_dir=str(folder)):
            return compose(given.config_name, overrides=given.overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(
            f"--verl: {' '.join(str(error).split())[:400].rstrip('.')}. Give arguments that verl's main_ppo takes."
        ) from error


def require(config: Any, paths: Iterable[str]) -> None:
    """Raise ConfigError for the first of these settings that a configuration lacks."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        for path in paths:
            OmegaConf.select(config, path, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"--verl: {' '.join(str(error).split())[:400]}") from error
