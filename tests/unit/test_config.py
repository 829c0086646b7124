"""The `mismatch:` block: strict, from every form, with errors that name key, value, allowed values and nearest key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_ext.config import LossScaleConfig, MismatchConfig, MonitorConfig, PrecisionConfig
from mismatch_ext.errors import ConfigError

BLOCK = {"precision": {"dtype": "float16", "loss_scale": {"init_scale": 1024}}, "monitor": {"profile_every": 3}}
EXPECTED = MismatchConfig(
    precision=PrecisionConfig(dtype="float16", loss_scale=LossScaleConfig(init_scale=1024.0)),
    monitor=MonitorConfig(profile_every=3),
)
YAML = "precision:\n  dtype: float16\n  loss_scale: {init_scale: 1024}\nmonitor: {profile_every: 3}\n"


def test_the_same_block_from_every_form(tmp_path: Path) -> None:
    json_file, yaml_file = tmp_path / "block.json", tmp_path / "block.yaml"
    json_file.write_text(json.dumps({"mismatch": BLOCK}))
    yaml_file.write_text(YAML)
    forms = [BLOCK, json.dumps(BLOCK), YAML, str(json_file), yaml_file, EXPECTED]
    assert [MismatchConfig.parse(form) for form in forms] == [EXPECTED] * len(forms)


def test_no_block_is_none_and_an_empty_block_measures_only() -> None:
    assert MismatchConfig.parse(None) is None
    empty = MismatchConfig.parse({})
    assert empty == MismatchConfig.parse("{}")
    assert empty is not None and empty.precision is None and empty.monitor == MonitorConfig()


def test_round_trip_through_plain_data() -> None:
    assert MismatchConfig.parse(json.loads(json.dumps(EXPECTED.to_dict()))) == EXPECTED
    assert "precision" not in MismatchConfig().to_dict()


@pytest.mark.parametrize(
    "kl",
    [{"preset": "trl", "coef": 0.1}, {"coef": 0.1}, {"estimator": "k3"}, {"estimator": "full", "ratio": "sequence"}],
)
def test_kl_survives_a_round_trip(kl: dict[str, object]) -> None:
    block = MismatchConfig.parse({"kl": kl})
    assert block is not None and MismatchConfig.parse(json.loads(json.dumps(block.to_dict()))) == block


@pytest.mark.parametrize(
    ("estimator", "placement"), [("k1", "reward"), ("k2", "loss"), ("k3", "both"), ("full", "both")]
)
def test_placement_follows_the_estimator(estimator: str, placement: str) -> None:
    block = MismatchConfig.parse({"kl": {"estimator": estimator}})
    assert block is not None and block.kl is not None and block.kl.placement == placement


def test_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EXPECTED.monitor.profile_every = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"precission": {"dtype": "float16"}},
            ["'precission'", "precision, correction, kl, routing, lr, monitor", "Did you mean 'precision'?"],
        ),
        ({"precision": {"dtyp": "float16"}}, ["mismatch.precision", "'dtyp'", "'float16'", "Did you mean 'dtype'?"]),
        ({"precision": {"dtype": "float8"}}, ["mismatch.precision.dtype", "'float8'", "'float16', 'bfloat16'"]),
        ({"precision": {}}, ["mismatch.precision", "missing key 'dtype'"]),
        ({"precision": []}, ["mismatch.precision", "expected a mapping", "list"]),
        ({"precision": {"dtype": 16}}, ["mismatch.precision.dtype", "16", "allowed"]),
        (
            {"precision": {"dtype": "float16", "loss_scale": {"init_scale": "1e4"}}},
            ["mismatch.precision.loss_scale.init_scale", "expected float", "'1e4'", "1.0e-3"],
        ),
        (
            {"precision": {"dtype": "float16", "loss_scale": {"backoff_factor": 2}}},
            ["mismatch.precision.loss_scale.backoff_factor", "2", "0 < x < 1"],
        ),
        (
            {"precision": {"dtype": "float16", "loss_scale": {"init_scale": float("inf")}}},
            ["mismatch.precision.loss_scale.init_scale", "inf", "a finite number"],
        ),
        ({"routing": {"mode": "R4"}}, ["mismatch.routing.mode", "'R4'", "'R2', 'R3'"]),
        ({"routing": {}}, ["mismatch.routing", "missing key 'mode'"]),
        (
            {"routing": {"mode": "R3", "agreement_rate": 1.5}},
            ["mismatch.routing.agreement_rate", "1.5", "0 <= x <= 1"],
        ),
        (
            {"routing": {"mode": "R2", "native_gap_rate": 0.5}},
            ["mismatch.routing.native_gap_rate", "0.5", "mode='R2'", "leave it out"],
        ),
        ({"monitor": {"profile_every": 0}}, ["mismatch.monitor.profile_every", "0", ">= 1"]),
        ({"monitor": {"profile_every": True}}, ["mismatch.monitor.profile_every", "expected int", "bool"]),
        ({"monitor": {"weight_sync": "eror"}}, ["'eror'", "'error', 'warn', 'off'", "Did you mean 'error'?"]),
        ({"monitor": {"alarms": []}}, ["mismatch.monitor.alarms", "expected a mapping", "list []"]),
        ({"monitor": {"alarms": {3: {"above": 1}}}}, ["mismatch.monitor.alarms", "key 3", "found int"]),
        ({"monitor": {"alarms": {"k3_kl": 1e-3}}}, ["mismatch.monitor.alarms.k3_kl", "expected a mapping", "0.001"]),
        (
            {"monitor": {"alarms": {"k3_kl": {"abov": 1}}}},
            ["mismatch.monitor.alarms.k3_kl", "'abov'", "Did you mean 'above'?"],
        ),
        (
            {"monitor": {"alarms": {"k3_kl": {"action": "hlt"}}}},
            ["mismatch.monitor.alarms.k3_kl.action", "'hlt'", "'warn', 'stop', 'call', 'off'"],
        ),
        (
            {"monitor": {"alarms": {"k3_kl": {"above": "1e-3"}}}},
            ["mismatch.monitor.alarms.k3_kl.above", "expected float", "1.0e-3"],
        ),
        ({"monitor": {"alarms": {"k3_kl": {"patience": 0}}}}, ["alarms.k3_kl.patience", "0", "an integer >= 1"]),
        (
            {"monitor": {"alarms": {"reward": {"action": "stop"}}}},
            ["mismatch.monitor.alarms.reward", "above=None", "no built-in threshold", "k3_kl, logp_abs_diff_mean"],
        ),
        (
            {"monitor": {"alarms": {"reward": {"above": 1, "below": 2}}}},
            ["mismatch.monitor.alarms.reward.below", "2.0", "x < above (1)"],
        ),
        (
            {"monitor": {"alarms": {"k3_kl": {"clear": 0.01}}}},
            ["mismatch.monitor.alarms.k3_kl.clear", "0.01", "x <= above (0.001)"],
        ),
        (
            {"monitor": {"alarms": {"ess_token": {"clear": 0.2}}}},
            ["mismatch.monitor.alarms.ess_token.clear", "0.2", "x >= below (0.3)"],
        ),
        (
            {"monitor": {"alarms": {"loss": {"clear": 1}}}},
            ["mismatch.monitor.alarms.loss.clear", "1.0", "without a threshold"],
        ),
        (
            {"monitor": {"alarms": {"k3_kl": {"action": "call"}}}},
            ["mismatch.monitor.alarms.k3_kl.call", "None", "'package.module:function'"],
        ),
        (
            {"monitor": {"alarms": {"k3_kl": {"action": "call", "call": "module.function"}}}},
            ["mismatch.monitor.alarms.k3_kl.call", "'module.function'", "'package.module:function'"],
        ),
        (
            {"monitor": {"alarms": {"k3_kl": {"call": "module:function"}}}},
            ["mismatch.monitor.alarms.k3_kl.call", "'module:function'", "action='warn'", "leave call out"],
        ),
        (
            {"monitor": {"alarms": {"k3_kl": {}, "mismatch/k3_kl": {}}}},
            ["mismatch.monitor.alarms", "'k3_kl' and 'mismatch/k3_kl'", "one metric"],
        ),
        ({"monitor": {"alarms": {"eval_reward": {"above": 1}}}}, ["'eval_reward'", "a metric of the training logs"]),
        ({"monitor": {"default_alarms": 1}}, ["mismatch.monitor.default_alarms", "expected bool", "1"]),
        ("[1, 2]", ["expected a mapping", "list"]),
        ("precision: [", ["neither valid JSON nor valid YAML"]),
        ("missing.yaml", ["missing.yaml", "cannot be read"]),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(block: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        MismatchConfig.parse(block)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_yaml_off_is_the_word_off() -> None:
    block = MismatchConfig.parse("monitor: {weight_sync: off}")
    assert block is not None and block.monitor.weight_sync == "off"


KEYS = st.sampled_from(
    ["precision", "monitor", "alarms", "dtype", "loss_scale", "init_scale", "weight_sync"]
) | st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


@given(st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(KEYS, x), max_leaves=6))
def test_anything_else_is_a_config_error_or_a_config(data: object) -> None:
    try:
        block = MismatchConfig.parse(data)  # type: ignore[arg-type]
    except ConfigError:
        return
    assert block is None or isinstance(block, MismatchConfig)
