"""The `mismatch:` block: strict, from every form, with errors that name key, value, allowed values and nearest key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mismatch_ext.config import (
    AlarmConfig,
    CorrectionConfig,
    LossScaleConfig,
    LrConfig,
    MismatchConfig,
    MonitorConfig,
    PrecisionConfig,
)
from mismatch_ext.errors import ConfigError

BLOCK = {"precision": {"dtype": "float16", "loss_scale": {"init_scale": 1024}}, "monitor": {"default_alarms": False}}
EXPECTED = MismatchConfig(
    precision=PrecisionConfig(dtype="float16", loss_scale=LossScaleConfig(init_scale=1024.0)),
    monitor=MonitorConfig(default_alarms=False),
)
YAML = "precision:\n  dtype: float16\n  loss_scale: {init_scale: 1024}\nmonitor: {default_alarms: false}\n"


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
    [{"coef": 0.1, "target_kl": 0.02}, {"coef": 0.1}, {"estimator": "k3"}, {"estimator": "full", "ratio": "sequence"}],
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
        EXPECTED.monitor.default_alarms = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"precission": {"dtype": "float16"}},
            [
                "'precission'",
                "precision, correction, kl, routing, sampling_mask, lr, monitor",
                "Did you mean 'precision'?",
            ],
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
            {"precision": {"dtype": "float16", "loss_scale": {"growth_interval": 0}}},
            ["mismatch.precision.loss_scale.growth_interval", "0", "an integer >= 1"],
        ),
        (
            {"precision": {"dtype": "float16", "loss_scale": {"init_scale": float("inf")}}},
            ["mismatch.precision.loss_scale.init_scale", "inf", "a finite number"],
        ),
        ({"kl": {"coef": 10**400}}, ["mismatch.kl.coef", "inf", "a finite number"]),
        ({"routing": {"mode": "R4"}}, ["mismatch.routing.mode", "'R4'", "'R2', 'R3'"]),
        ({"routing": {}}, ["mismatch.routing", "missing key 'mode'"]),
        ({"routing": {"mode": "R3", "measured": 1.5}}, ["mismatch.routing.measured", "1.5", "0 <= x <= 1"]),
        ({"lr": {"period": True}}, ["mismatch.lr.period", "expected int", "bool"]),
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
            ["mismatch.monitor.alarms.k3_kl.action", "'hlt'", "'warn', 'stop', 'off'"],
        ),
        (
            {"monitor": {"alarms": {"k3_kl": {"above": "1e-3"}}}},
            ["mismatch.monitor.alarms.k3_kl.above", "expected float", "1.0e-3"],
        ),
        ({"monitor": {"alarms": {"k3_kl": {"patience": 0}}}}, ["alarms.k3_kl.patience", "0", "an integer >= 1"]),
        (
            {"monitor": {"alarms": {"reward": {"action": "stop"}}}},
            [
                "mismatch.monitor.alarms.reward",
                "above=None",
                "no built-in threshold",
                "k3_kl, k3_growth_low, logp_abs_diff_mean",
            ],
        ),
        (
            {"monitor": {"alarms": {"reward": {"above": 1, "below": 2}}}},
            ["mismatch.monitor.alarms.reward.below", "2.0", "x < above (1)"],
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


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: MismatchConfig(level="observ"), ["mismatch.level", "'observ'", "Did you mean 'observe'?"]),
        (lambda: MonitorConfig(weight_sync="eror"), ["mismatch.monitor.weight_sync", "Did you mean 'error'?"]),
        (lambda: PrecisionConfig(dtype="fp16"), ["mismatch.precision.dtype", "Did you mean 'float16'?"]),
        (lambda: LrConfig(period=2.5), ["mismatch.lr.period", "expected int", "2.5"]),
        (lambda: LrConfig(decay=float("nan")), ["mismatch.lr.decay", "a finite number"]),
        (lambda: MonitorConfig(alarms={"k3_kl": {"action": "hlt"}}), ["mismatch.monitor.alarms.k3_kl.action", "'hlt'"]),
        (lambda: AlarmConfig(action="hlt"), ["action", "'hlt'"]),
        (lambda: MismatchConfig(lr={"period": 0}), ["mismatch.lr.period", "0"]),
        (lambda: dataclasses.replace(MismatchConfig(), level="observ"), ["mismatch.level", "'observ'"]),
    ],
)
def test_a_dataclass_checks_what_parse_checks(build: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    for word in words:
        assert word in str(caught.value)


def test_a_dataclass_takes_what_parse_takes() -> None:
    block = {"lr": {"decay": 0.5, "floor": 1}, "monitor": {"alarms": {"k3_kl": {"above": 1}}}}
    assert MismatchConfig(**block) == MismatchConfig.parse(block)  # type: ignore[arg-type]
    assert isinstance(LrConfig(floor=1).floor, float)
    assert CorrectionConfig(reject="token_k1", reject_threshold=2).reject_threshold == 2.0


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"correction": {}}, ["mismatch.correction is empty", "token_truncate"]),
        ({"correction": {"preset": "tiss"}}, ["mismatch.correction.preset", "'tiss'", "Did you mean 'tis'?"]),
        ({"correction": {"reject": "token_k3"}}, ["reject_threshold"]),
        ({"kl": {"estimator": "full", "placement": "reward", "target": "token"}}, ["mismatch.kl", "no gradient"]),
        ({"kl": {"estimator": "full", "reward_path": "rewards"}}, ["mismatch.kl.reward_path", "estimator='full'"]),
        ({"kl": {"reward_path": "rewards", "ratio": "sequence"}}, ["mismatch.kl.reward_path", "ratio='sequence'"]),
    ],
)
def test_sections_that_would_do_nothing_are_refused_when_they_are_read(
    block: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        MismatchConfig.parse(block)
    for word in words:
        assert word in str(caught.value)


def test_a_whole_number_is_a_threshold() -> None:
    block = MismatchConfig.parse("correction: {reject: token_k1, reject_threshold: 2}")
    assert block is not None and block.correction is not None and block.correction.reject_threshold == 2.0


def test_yaml_off_is_the_word_off() -> None:
    block = MismatchConfig.parse("monitor: {weight_sync: off}")
    assert block is not None and block.monitor.weight_sync == "off"


# A section that is written with nothing after it.

SECTIONS = ("precision", "correction", "kl", "routing", "sampling_mask", "lr", "monitor")
WRITTEN: list[Callable[[str], object]] = [
    lambda name: f"{name}:\n",
    lambda name: f"mismatch:\n  {name}:\n",
    lambda name: f"{name}: ~",
    lambda name: json.dumps({name: None}),
    lambda name: {name: None},
    lambda name: OmegaConf.create({"mismatch": {name: None}}).mismatch,
]


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_with_nothing_after_it_says_how_to_switch_it_on_and_off(
    written: Callable[[str], object], name: str, tmp_path: Path
) -> None:
    given = written(name)
    forms = [given]
    if isinstance(given, str):
        forms.append(tmp_path / "block.yaml")
        forms[1].write_text(given)  # type: ignore[attr-defined]
    for form in forms:
        with pytest.raises(ConfigError, match=rf"mismatch.{name}: nothing is given.*{name}: {{}}.*leave the key out"):
            MismatchConfig.parse(form)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["kl", "lr", "monitor", "sampling_mask"])
def test_an_empty_mapping_switches_a_section_on(name: str) -> None:
    block = MismatchConfig.parse({name: {}})
    assert block is not None and block == MismatchConfig.parse(f"{name}: {{}}")
    assert getattr(block, name) is not None and name in block.to_dict()
    assert MismatchConfig.parse(json.loads(json.dumps(block.to_dict()))) == block


def test_a_part_of_a_section_with_nothing_after_it() -> None:
    for text in (
        "mismatch:\n",
        "precision: {dtype: float16, loss_scale: }",
        "monitor:\n  alarms:\n",
        "monitor: {alarms: {k3_kl: }}",
    ):
        with pytest.raises(ConfigError, match="nothing is given"):
            MismatchConfig.parse(text)
    assert MismatchConfig.parse("") == MismatchConfig.parse("mismatch: {}") == MismatchConfig()


def test_none_is_off_for_a_dataclass_and_a_value_where_it_is_one() -> None:
    block = MismatchConfig(lr=None, kl=None)
    assert block == MismatchConfig() and block.to_dict().keys() == {"monitor"}
    lengths = MismatchConfig.parse({"lr": {"period": None}, "kl": {"coef": None}})
    assert lengths is not None and lengths.lr is not None and lengths.kl is not None
    assert lengths.lr.period is None and lengths.kl.coef is None
    assert MismatchConfig.parse(lengths.to_dict()) == lengths


@pytest.mark.parametrize("value", [False, "off", []])
def test_what_is_not_a_section_says_how_it_is_switched_off(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"mismatch.lr: expected a mapping.*or {} for its defaults. Left out, it is off"
    ):
        MismatchConfig.parse({"lr": value})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: {period: 5}\nmonitor: {}\nlr: {period: 7}\n", ["line 3", "'lr'", "{'period': 5}", "{'period': 7}"]),
        ("lr:\n  period: 5\n  period: 7\n", ["line 3", "'period'", "as 5 and as 7"]),
        ('{"lr": {"period": 5}, "lr": {"period": 7}}', ["'lr'", "{'period': 5}", "{'period': 7}"]),
        ('{"mismatch": {"lr": {"period": 5, "period": 5}}}', ["'period'", "as 5 and as 5"]),
    ],
)
def test_a_key_that_is_given_twice_is_named(text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "block.yaml"
    file.write_text(text)
    for form in (text, file):
        with pytest.raises(ConfigError, match="given twice") as caught:
            MismatchConfig.parse(form)
        assert all(word in str(caught.value) for word in words), caught.value


def test_a_merged_mapping_may_be_overridden() -> None:
    block = MismatchConfig.parse("lr: {surge_ratio: 3.0, decay: 0.7}\n")
    merged = MismatchConfig.parse("lr: {<<: {surge_ratio: 9.0, decay: 0.7}, surge_ratio: 3.0}\n")
    assert block == merged


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"lr":' * 100_000, "{a: " * 20_000, "- " * 20_000 + "x", "{", "1" * 5000, "lr: 2001-99-99"],
    ids=["lists", "json", "yaml", "items", "open", "digits", "date"],
)
def test_text_that_cannot_be_read_is_a_config_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "block.json"
    file.write_text(text)
    for form in (text, file):
        with pytest.raises(ConfigError) as caught:
            MismatchConfig.parse(form)
        assert "mismatch" in str(caught.value) and len(str(caught.value)) < 2000


def test_what_is_nested_deeply_is_shown_in_short() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for block in ({"lr": deep}, {"leer": deep}, {"lr": {"period": deep}}, {"lr": {"rule": deep}}, deep):
        with pytest.raises(ConfigError) as caught:
            MismatchConfig.parse(block)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 1000


def test_a_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "block.yaml").write_text("lr: {}\n")
    assert MismatchConfig.parse("~/block.yaml") == MismatchConfig(lr=LrConfig())
    with pytest.raises(ConfigError, match="~nobody-of-that-name/block.yaml cannot be read"):
        MismatchConfig.parse("~nobody-of-that-name/block.yaml")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("fp16", "float16"), ("half", "float16"), ("FP16", "float16"), ("f16", "float16"), ("torch.float16", "float16"),
        ("bf16", "bfloat16"), ("torch.bfloat16", "bfloat16"), ("fp32", "float32"), ("float", "float32"), ("f32", "float32"),
        (16, "float16"),
    ],
)  # fmt: skip
def test_another_name_of_a_dtype_is_understood_in_the_error(given: object, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"mismatch.precision.dtype: {given!r} .* Did you mean '{meant}'"):
        MismatchConfig.parse({"precision": {"dtype": given}})


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
