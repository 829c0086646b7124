"""The `mismatch:` block: strict, from every form, with errors that name key, value, allowed values and nearest key."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mismatch_ext import config
from mismatch_ext.config import (
    AlarmConfig,
    CorrectionConfig,
    KlConfig,
    MismatchConfig,
    MonitorConfig,
    PrecisionConfig,
)
from mismatch_ext.errors import ConfigError
from mismatch_ext.presets import ResolvedCorrection, resolve
from tests.unit.tables import table

BLOCK = {
    "precision": {"dtype": "float16", "init_scale": 1024},
    "correction": {"reject": {"token_k1": [0.5, 2], "seq_mean_k3": 1}},
    "monitor": {"default_alarms": False, "alarms": {"k3_kl": {"action": "off"}}},
}
EXPECTED = MismatchConfig(
    precision=PrecisionConfig(dtype="float16", init_scale=1024.0),
    correction=CorrectionConfig(reject={"token_k1": (0.5, 2.0), "seq_mean_k3": 1.0}),
    monitor=MonitorConfig(default_alarms=False, alarms={"k3_kl": AlarmConfig(action="off")}),
)
YAML = """
precision: {dtype: float16, init_scale: 1024}
correction: {reject: {token_k1: [0.5, 2], seq_mean_k3: 1}}
monitor: {default_alarms: false, alarms: {k3_kl: {action: off}}}
"""


def parsed(value: Any) -> MismatchConfig:
    block = MismatchConfig.parse(value)
    assert block is not None
    return block


def refused(build: Callable[[], object], *words: str) -> None:
    """Expect a ConfigError with these words."""
    with pytest.raises(ConfigError) as caught:
        build()
    for word in words:
        assert word in str(caught.value)


def test_the_same_block_from_every_form(tmp_path: Path) -> None:
    json_file, yaml_file = tmp_path / "block.json", tmp_path / "block.yaml"
    json_file.write_text(json.dumps({"mismatch": BLOCK}))
    yaml_file.write_text(YAML)
    forms = [BLOCK, json.dumps(BLOCK), YAML, str(json_file), yaml_file, OmegaConf.create(BLOCK), EXPECTED]
    assert [MismatchConfig.parse(form) for form in forms] == [EXPECTED] * len(forms)
    assert MismatchConfig(**BLOCK) == EXPECTED  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(EXPECTED)) == EXPECTED and hash(EXPECTED) == hash(parsed(YAML))


def test_no_block_is_none_and_an_empty_block_measures_only() -> None:
    assert MismatchConfig.parse(None) is None
    assert parsed({}) == parsed("{}") == parsed("") == parsed("mismatch: {}") == MismatchConfig()
    assert MismatchConfig().features == ("monitor", "monitor.weight_sync") and parsed({}).to_dict().keys() == {
        "monitor"
    }


@pytest.mark.parametrize(
    ("estimator", "placement"), [("k1", "reward"), ("k2", "loss"), ("k3", "both"), ("full", "both")]
)
def test_placement_follows_the_estimator(estimator: Any, placement: str) -> None:
    assert KlConfig(estimator=estimator).applied_placement == placement
    assert KlConfig(estimator=estimator, placement="both").applied_placement == "both"


REQUIRED: dict[str, Any] = {"mismatch.precision": {"dtype": "float16"}, "mismatch.routing": {"mode": "R3"}}
REQUIRED["mismatch.correction"] = {"preset": "tis"}


@pytest.mark.parametrize("path", config._SECTIONS)
def test_no_section_derives_one_key_from_another_when_it_is_made(path: str) -> None:
    """What a key has when it is left out must not be fixed by the other keys: `replace` would keep it."""
    section, required = config._SECTIONS[path], REQUIRED.get(path, {})
    made: Any = section(**required)
    for key in dataclasses.fields(section):  # type: ignore[arg-type]
        if key.name in required:
            continue
        default = key.default_factory() if callable(key.default_factory) else key.default
        assert getattr(made, key.name) == default, key.name


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"preset": "slime_mis", "veto": None, "normalize": None}, {"level": "token", "upper": 2.0}),
        # The bounds of a preset's weight go with the weight.
        ({"preset": "tis", "level": "none"}, {}),
    ],
)
def test_null_switches_a_key_of_the_preset_off(keys: dict[str, Any], wanted: dict[str, Any]) -> None:
    block = parsed({"correction": keys})
    assert (
        parsed(OmegaConf.create({"correction": keys})) == MismatchConfig(correction=CorrectionConfig(**keys)) == block
    )
    assert block.correction is not None and resolve(block.correction) == ResolvedCorrection(**wanted)
    # Also on the way to other processes, in a checkpoint and under another setting.
    assert parsed(json.loads(json.dumps(block.to_dict()))) == block == pickle.loads(pickle.dumps(block))


@pytest.mark.parametrize(*table("config_refusals"))
def test_errors_name_key_value_and_what_is_allowed(block: Any, words: list[str]) -> None:
    refused(lambda: MismatchConfig.parse(block), *words)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: MonitorConfig(weight_sync="eror"), ["mismatch.monitor.weight_sync", "Did you mean 'error'?"]),
        (lambda: MonitorConfig(alarms={"k3_kl": {"action": "hlt"}}), ["mismatch.monitor.alarms.k3_kl.action", "'hlt'"]),
        (lambda: dataclasses.replace(KlConfig(), coef=-1.0), ["mismatch.kl.coef", "-1.0"]),
    ],
)
def test_a_dataclass_checks_what_parse_checks(build: Callable[[], object], words: list[str]) -> None:
    refused(build, *words)


# A section that is written with nothing after it.

SECTIONS = ("precision", "correction", "kl", "routing", "sampling_mask", "lr", "monitor")
WRITTEN: list[Callable[[str], object]] = [
    lambda name: f"{name}:\n",
    lambda name: {name: None},
    lambda name: OmegaConf.create({"mismatch": {name: None}}).mismatch,
]


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_with_nothing_after_it_says_how_to_switch_it_on_and_off(
    written: Callable[[str], object], name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"mismatch.{name}: nothing is given.*{name}: {{}}.*leave the key out"):
        MismatchConfig.parse(written(name))


# Texts.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: {period: 5}\nmonitor: {}\nlr: {period: 7}\n", ["line 3", "'lr'", "{'period': 5}", "{'period': 7}"]),
        ('{"lr": {"period": 5}, "lr": {"period": 7}}', ["'lr'", "{'period': 5}", "{'period': 7}"]),
    ],
)
def test_a_key_that_is_given_twice_is_named(text: str, words: list[str]) -> None:
    refused(lambda: MismatchConfig.parse(text), "given twice", *words)


def test_a_block_with_every_section_is_read_without_torch() -> None:
    block = {
        **{"precision": {"dtype": "float16"}, "correction": {"preset": "token_truncate"}, "kl": {"estimator": "k3"}},
        **{"routing": {"mode": "R3"}, "lr": {}, "sampling_mask": {}},
        "monitor": {"alarms": {"k3_kl": {"above": 0.1}, "my/reward": {"below": 0.0}}, "evidence": False},
    }
    code = (
        f"import sys, mismatch_ext\nmismatch_ext.MismatchConfig(**{block})\n"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


KEYS = st.sampled_from(
    ["precision", "correction", "monitor", "alarms", "dtype", "reject", "token_k1", "init_scale", "weight_sync"]
) | st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


@settings(deadline=None)  # the first alarm loads its rules
@given(st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(KEYS, x), max_leaves=6))
def test_anything_else_is_a_config_error_or_a_config(data: object) -> None:
    try:
        block = MismatchConfig.parse(data)
    except ConfigError:
        return
    assert block is None or isinstance(block, MismatchConfig)


@pytest.mark.parametrize(("share", "acts"), [(None, False), (0.01, True), (1.0, False)])
def test_a_config_that_bad_rows_can_end_acts(share: float | None, acts: bool) -> None:
    monitor = {} if share is None else {"max_bad_rows": share}
    block = MismatchConfig.parse({"monitor": monitor})
    assert block.acts == acts
    assert not block.only_measuring().acts
