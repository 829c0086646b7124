"""The `mismatch:` block: one strict, frozen configuration for every host trainer, with one module per section.

A section that is absent is off, and the host then behaves as without this package. The block can be given as a dict, a JSON
or YAML string, the path of a JSON or YAML file, or a ready dataclass.
"""

from mismatch_ext.config.block import MismatchConfig
from mismatch_ext.config.correction import CorrectionConfig
from mismatch_ext.config.kl import KlConfig
from mismatch_ext.config.lr import LrConfig, Trigger
from mismatch_ext.config.monitor import AlarmConfig, MonitorConfig
from mismatch_ext.config.precision import LossScaleConfig, PrecisionConfig, QuantizedConfig
from mismatch_ext.config.routing import RoutingConfig
from mismatch_ext.config.sampling_mask import SamplingMaskConfig
from mismatch_ext.strict import Action

__all__ = [
    "Action",
    "AlarmConfig",
    "CorrectionConfig",
    "KlConfig",
    "LossScaleConfig",
    "LrConfig",
    "MismatchConfig",
    "MonitorConfig",
    "PrecisionConfig",
    "QuantizedConfig",
    "RoutingConfig",
    "SamplingMaskConfig",
    "Trigger",
]
