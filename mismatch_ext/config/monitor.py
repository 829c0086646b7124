"""The `monitor` section: what is measured, checked and watched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mismatch_ext.strict import Action, settle
from mismatch_ext.strict import require as _require


@dataclass(frozen=True, kw_only=True)
class AlarmConfig:
    """When a metric of the training logs is out of bounds, and what happens then.

    A value that is not finite is out of bounds under any rule. `python -m mismatch_ext.monitor` prints the rules that are
    built in; naming the metric of one changes only the keys that are given, so that `{"k3_kl": {"action": "stop"}}` keeps
    its threshold. Another metric needs `above` or `below`.
    """

    above: float | None = None
    """Values greater than this are out of bounds."""
    below: float | None = None
    """Values less than this are out of bounds."""
    patience: int | None = None
    """Logs in a row out of bounds before the alarm is raised; None is the built-in rule's, else 3. A log without the metric
    does not count. The alarm is over, and may be raised again, after as many logs in a row that are back by a fifth: at
    0.8 * `above` or `below` / 0.8 (of negative bounds `above` / 0.8 and 0.8 * `below`); where both bounds are set, no further
    than midway between them."""
    action: Literal["warn", "stop", "off"] | None = None
    """`stop` ends training after the step, with a checkpoint (the alarm begins anew if that is resumed); `off` switches
    a built-in rule off; None is `warn`. All but `off` warn and are written to the metrics file."""

    def __post_init__(self) -> None:
        settle(self, "mismatch.monitor.alarms")


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """What is measured and checked while training; the host's own numbers stay as they are.

    On a CPU any block makes TRL's engine run uncompiled and update its weights by vLLM's layer-wise reload: compiled it
    starts far slower, and TRL's own update fails there, or garbles the experts.
    """

    run_dir: str | None = None
    """Folder of `metrics.jsonl`; default is `<output_dir>/mismatch`. A `~` in front is the home folder."""
    weight_sync: Action = "error"
    """What to do when, after a weight update, the engine computes with stale or garbled weights: its prefill with others than the
    trainer, or its decode with others than its prefill."""
    alarms: dict[str, AlarmConfig] = field(default_factory=dict, hash=False)
    """Alarms by metric as it is logged; the prefix `mismatch/` may be left out. They are laid over the built-in ones.
    Evaluation metrics are not watched."""
    default_alarms: bool = True
    """Whether the built-in alarms are on that `alarms` does not name."""
    doctor: Literal["first_batch", "on_alarm"] | None = None
    """When a batch of a TRL run is examined for why its two sides differ: the first one, or the next one after an alarm was
    raised, once for each metric; None examines none. With verl use `mismatch-ext doctor --verl`. It needs a copy of the weights
    in the main process while it looks; see docs/doctor.md."""

    def __post_init__(self) -> None:
        settle(self, "mismatch.monitor")
        # Imports torch, which `mismatch-ext compat` and other commands without a block do without.
        from mismatch_ext.monitor.rules import resolve

        # Without a rule no alarm is ever raised.
        _require(
            bool(resolve(self)) or self.doctor != "on_alarm",
            "mismatch.monitor.doctor",
            self.doctor,
            "'first_batch', or 'on_alarm' with an alarm: name one in mismatch.monitor.alarms, or leave default_alarms on",
        )
