"""The whole `mismatch:` block, and the forms that it is read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mismatch_ext.config.correction import CorrectionConfig
from mismatch_ext.config.kl import KlConfig
from mismatch_ext.config.lr import LrConfig
from mismatch_ext.config.monitor import MonitorConfig
from mismatch_ext.config.precision import PrecisionConfig
from mismatch_ext.config.routing import RoutingConfig
from mismatch_ext.config.sampling_mask import SamplingMaskConfig
from mismatch_ext.loading import load_mapping
from mismatch_ext.strict import build, plain, settle
from mismatch_ext.verdicts import Level


@dataclass(frozen=True, kw_only=True)
class MismatchConfig:
    """The whole `mismatch:` block."""

    level: Level = "enforce"
    """`enforce` applies the sections, and ends a run whose checks fail. `observe` applies no section, measures as an empty block
    does, and warns of each check that fails; see docs/metrics.md."""
    precision: PrecisionConfig | None = None
    """Uniform precision on both sides; absent leaves the host's dtypes alone."""
    correction: CorrectionConfig | None = None
    """Importance weights; absent leaves the host's own correction alone."""
    kl: KlConfig | None = None
    """KL regularisation; absent leaves the host's own KL term alone."""
    routing: RoutingConfig | None = None
    """Expert routing replay; absent lets every forward pass route for itself."""
    sampling_mask: SamplingMaskConfig | None = None
    """Sampling-mask replay; absent scores sampled tokens over the whole vocabulary."""
    lr: LrConfig | None = None
    """Learning-rate control; absent leaves the host's schedule alone."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Measurement; on with its defaults whenever a block is given, even an empty one."""

    def __post_init__(self) -> None:
        settle(self, "mismatch")

    @property
    def features(self) -> tuple[str, ...]:
        """The features that the block switches on, such as ("monitor", "monitor.weight_sync", "routing.R3")."""
        proof = () if self.monitor.weight_sync == "off" else ("monitor.weight_sync",)
        routing = () if self.routing is None else (f"routing.{self.routing.mode}",)
        sections = [
            name for name in ("precision", "lr", "kl", "correction", "sampling_mask") if getattr(self, name) is not None
        ]
        doctor = () if self.monitor.doctor is None else ("monitor.doctor",)
        return ("monitor", *proof, *doctor, *sections, *routing)

    @property
    def acting(self) -> MismatchConfig:
        """The block with the sections that act: all of them, or under `observe` none."""
        if self.level == "enforce":
            return self
        return replace(self, precision=None, correction=None, kl=None, routing=None, sampling_mask=None, lr=None)

    @classmethod
    def parse(cls, value: MismatchConfig | Mapping[str, Any] | str | Path | None) -> MismatchConfig | None:
        """Read the block from any of its forms.

        Args:
            value: None (no block: stock behaviour), a mapping, a JSON or YAML string, the path of a `.json`, `.yaml`
                or `.yml` file (with or without a top-level `mismatch:` key), or a `MismatchConfig`. A key of a section with
                nothing after it (null, None) is an error: `{}` switches the section on with its defaults, and it is off if
                the key is left out.

        Returns:
            The frozen configuration, or None when no block was given.

        Raises:
            ConfigError: Unknown key, wrong type, value out of range, unreadable text or file. The message names the
                key, the value, what is allowed, and the nearest known key.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, (str, Path)):
            value = load_mapping(value)
        return build(cls, value, "mismatch")

    def to_dict(self) -> dict[str, Any]:
        """Return the block as plain JSON-able data, without absent sections, and without the level if it is the default."""
        found = plain(self)
        if self.level == "enforce":
            del found["level"]
        return found
