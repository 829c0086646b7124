"""The built-in alarms: thresholds on logged metrics, each with its source. All of them only warn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mismatch_ext.host_names import PREFIX, roles_table
from mismatch_ext.metrics.names import MEASURES

PATIENCE = 3


@dataclass(frozen=True, kw_only=True)
class DefaultRule:
    """A built-in alarm.

    Args:
        above: Values greater than this are out of bounds.
        below: Values less than this are out of bounds; without `above` and `below`, only values that are not finite.
        patience: The alarm is raised after this many logs in a row are out of bounds.
        source: Where the threshold comes from.
        meaning: What an alarm means; the text follows "which means that".
        advice: What to do.
        superseded_by: A metric that says the same; if a log holds that metric, this rule is not watched.
        numerics: Whether the rule is about numerics. If rollouts may be stale, it then watches `mismatch/numerics/...`, and
            nothing in a log without it, because drift is not a fault of either side.
    """

    above: float | None = None
    below: float | None = None
    patience: int = PATIENCE
    source: str
    meaning: str
    advice: str
    superseded_by: str | None = None
    numerics: bool = False

    @property
    def main_side(self) -> Literal["above", "below", "non-finite"]:
        """The side that `meaning` and `advice` are about."""
        if self.above is not None:
            return "above"
        return "non-finite" if self.below is None else "below"


STALE_ADVICE = (
    "look at the weight-sync check and at temperature, top_p and log-probability settings on both sides first, then at "
    "dtypes"
)

DEFAULTS: dict[str, DefaultRule] = {
    PREFIX + "k3_kl": DefaultRule(
        above=1e-3,
        source="NeMo RL's documentation: below 1e-3 in a healthy run.",
        meaning="the rollout policy is further from the trainer's than in healthy runs",
        advice="give both sides one precision, correct by importance weights, or with experts replay their routing",
        numerics=True,
    ),
    PREFIX + "k3_growth_low": DefaultRule(
        above=2.0,
        source="verl pull request #7519: k3 grew from 0.0100 to 0.0313 in 32 steps with fp8 weights, and stayed flat with mxfp8; "
        "the factor is a choice.",
        meaning="the gap has more than doubled over the last logs, beyond what chance does to batches that are alike",
        advice="let the doctor examine a batch (TRL: monitor.doctor: on_alarm; verl: `mismatch-ext doctor --verl`), look at what "
        "the engine quantises and at whether each weight update is exact, and correct by importance weights until the cause is "
        "found",
        numerics=True,
    ),
    PREFIX + "logp_abs_diff_mean": DefaultRule(
        above=0.1,
        source="slime's CI asserts at most 0.1; TRL issue #5312: 0.201 with stale weights, 0.010 to 0.018 in healthy runs.",
        meaning="the two sides differ by as much as with stale weights",
        advice=STALE_ADVICE,
        numerics=True,
    ),
    PREFIX + "log_ppl_abs_diff": DefaultRule(
        above=0.1,
        source="A choice: the limit of logp_abs_diff_mean, for a gap that has one sign along a response.",
        meaning="whole responses are more, or less, probable to the engine than to the trainer",
        advice=STALE_ADVICE,
        numerics=True,
    ),
    PREFIX + "ess_token": DefaultRule(
        below=0.3,
        source="verl's documentation of rollout correction warns below 0.3, of truncated weights; these are not truncated.",
        meaning="few tokens carry most of the importance weight",
        advice="truncate or reject by mismatch.correction, and find what makes those tokens differ in the report's profiles",
    ),
    PREFIX + "phantom_clip_frac": DefaultRule(
        above=0.03,
        source="docs/stability.md: 0 without a mismatch, below 0.03 in runs as fast as their controls, over 0.048 in late ones.",
        meaning="the clip on pi_trainer/pi_engine stops tokens although the policy has not changed since they were sampled",
        advice="clip on the trainer's own ratio, by correction.preset: decoupled_token_is, or give both sides one precision",
    ),
    PREFIX + "routing/set_mismatch_frac": DefaultRule(
        above=0.2,
        source="A choice.",
        meaning="the trainer's routers would choose other experts than those that it replays",
        advice="see by layer whether one or all differ, and look at the weight-sync check and at dtypes",
    ),
    PREFIX + "overflow_streak": DefaultRule(
        above=4,
        patience=1,
        source="A choice: the scale starts too high for a few steps at most; the scaler stops the run after 20.",
        meaning="optimizer steps were skipped one after another because float16 gradients overflowed",
        advice="look at loss and gradient norm, and lower init_scale or the learning rate",
    ),
    MEASURES["logp_abs_diff_mean"].trl: DefaultRule(
        above=0.1,
        source="TRL issue #5312: 0.201 with stale weights, 0.010 to 0.018 in healthy runs; the limit is that of slime's CI.",
        meaning="the two sides differ by as much as with stale weights",
        advice=STALE_ADVICE,
        superseded_by=PREFIX + "logp_abs_diff_mean",
    ),
    "grad_norm": DefaultRule(
        source="A choice of patience: a single one is a skipped step of a float16 run.",
        meaning="the gradients hold NaN or infinity",
        advice="in float16 look at the loss scale, otherwise at the loss and the log-probabilities of the batch",
    ),
    "loss": DefaultRule(
        patience=1,
        source="No finite weights come of one that is not finite. Without a block transformers puts "
        "a mean of the steps since its last log in its place, 0 where every step is logged.",
        meaning="the weights are broken, or the next update breaks them",
        advice="go back to the last checkpoint and look at the log-probabilities and rewards of the batch",
    ),
}
"""Rules by logged metric, or by role. `ess_seq` has no rule: in healthy runs it falls as responses get longer."""


def table() -> str:
    """Return the built-in alarms as Markdown."""
    about = [f"`{name}`" for name, rule in DEFAULTS.items() if rule.numerics]
    lines = [
        "# Built-in alarms",
        "",
        "Printed by `python -m mismatch_ext.monitor`. Each warns after that many logs in a row; a value that is not finite is",
        "out of bounds under any of them. `mismatch.monitor.alarms` changes them and adds others, `default_alarms: false` leaves",
        "on only those that it names.",
        "",
        f"{', '.join(about)} are about numerics: where versions are followed (docs/drift.md)",
        "they watch `mismatch/numerics/...`, of tokens that the very weights sampled which score them, and nothing in a log",
        "without such tokens. Naming one in `alarms` changes nothing of that; for stale tokens give `stale/k3_kl` a threshold.",
        "",
        "With `mismatch.monitor.doctor: on_alarm` TRL's next batch after an alarm is examined for why the two sides differ "
        "(docs/doctor.md).",
        "",
        "Some metrics have another name in each host, and may be named by their role in all of them (a metric of that very name "
        "goes first):",
        "",
        *roles_table(),
        "",
        "| metric | out of bounds | logs in a row | it means that | what to do | source |",
        "|---|---|---|---|---|---|",
    ]
    for name, rule in DEFAULTS.items():
        bound = bounds_text(rule.above, rule.below)
        lines.append(
            f"| `{name}` | {bound} | {rule.patience} | {rule.meaning} | {rule.advice} | {rule.source.rstrip('.')} |"
        )
    return "\n".join(lines)


def bounds_text(above: float | None, below: float | None) -> str:
    """Return what is out of bounds, as text: "> 0.001", "< 0.3", "> 2 or < 0.5", or "not finite"."""
    parts = [f"{sign} {bound:g}" for sign, bound in ((">", above), ("<", below)) if bound is not None]
    return " or ".join(parts) or "not finite"
