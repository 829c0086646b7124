"""Each row of adapters/verl/refusals.toml refuses a setting, and what its sentence says to do makes verl's driver take it."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")  # part of `make setup`

import yaml
from mismatch_ext.adapters.verl.refusals import TABLE, refused
from omegaconf import DictConfig, OmegaConf

from mismatch_ext.config import MismatchConfig
from tests.peers.verl.prepared import configured

pytestmark = pytest.mark.usefixtures("hydra", "as_with_a_gpu")
ROLES = {"ACTOR": "actor_rollout_ref.actor", "REF": "actor_rollout_ref.ref", "ROLLOUT": "actor_rollout_ref.rollout",
         "MODEL": "actor_rollout_ref.model", "RC": "algorithm.rollout_correction"}  # fmt: skip
EXAMPLES = tomllib.loads(Path(__file__).with_name("refusal_rows.toml").read_text(encoding="utf-8"))["rows"]
"""What holds beside the setting, the setting that is refused, and what the sentence says to do."""


def settled(plain: DictConfig, *words: str) -> tuple[dict[str, Any], MismatchConfig]:
    """Return verl's configuration and the block with settings, which are divided by semicolons, put into them in order."""
    config = copy.deepcopy(plain)
    config.mismatch = {}
    for word in filter(None, "; ".join(words).split("; ")):
        path, _, value = word.partition("=")
        first, *rest = path.split(".")
        path = ".".join([ROLES.get(first, first), *rest])
        if path.isupper():
            path = f"ray_kwargs.ray_init.runtime_env.env_vars.{path}"
        OmegaConf.update(config, path, yaml.safe_load(value), force_add=True, merge=False)
    found: Any = OmegaConf.to_container(config, resolve=True)
    given = _without_nulls(found.pop("mismatch"))
    block = MismatchConfig.parse(given)
    assert block is not None
    return found, block


def _without_nulls(section: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value is not None
    }


@pytest.fixture(scope="module")
def plain() -> DictConfig:
    config = configured()
    OmegaConf.set_struct(config, False)
    return config


@pytest.mark.parametrize(("others", "bad", "cure"), EXAMPLES, ids=[f"{bad} -> {cure}" for _, bad, cure in EXAMPLES])
def test_a_row_refuses_its_setting_and_takes_what_it_says_to_do(
    plain: DictConfig, others: str, bad: str, cure: str
) -> None:
    (row, _), *_ = refused(*settled(plain, others, bad))
    first, *rest = bad.partition("=")[0].split(".")
    assert f"{row.path}.".startswith(f"{'.'.join([ROLES.get(first, first), *rest])}.")  # a section's row names its key
    assert list(refused(*settled(plain, others, bad, cure))) == []


def test_every_row_has_an_example(plain: DictConfig) -> None:
    seen = [row for others, bad, _ in EXAMPLES for row, _ in refused(*settled(plain, others, bad))]
    assert [row.path for row in TABLE if row not in seen] == []
