"""Names, meanings and formulas of the mismatch measures, and what verl and TRL call them.

d = old_logprob - rollout_logprob of a token sampled by the rollout policy mu; pi is the trainer's policy at sampling time;
r = exp(d); S = sum of d over a sequence; means are over unmasked tokens, or over sequences where the name says seq.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mismatch_ext.host_names import roles_table
from mismatch_ext.metrics.growth import GROWTH_MEASURES, LEAST
from mismatch_ext.routing.agreement import OTHER_PASSES, ROUTING_MEASURES


@dataclass(frozen=True)
class Measure:
    """One scalar: its formula, how to read it, and its names elsewhere (empty where there is none)."""

    formula: str
    meaning: str
    verl: str = ""
    trl: str = ""


MEASURES: dict[str, Measure] = {
    "tokens": Measure("n", "unmasked tokens measured"),
    "sequences": Measure("m", "sequences with at least one unmasked token"),
    "logp_abs_diff_mean": Measure(
        "mean |d|", "mean gap in nats per token", trl="sampling/sampling_logp_difference/mean"
    ),
    "logp_abs_diff_max": Measure(
        "max |d|", "largest gap of any token", trl="sampling/sampling_logp_difference/max"
    ),
    "kl": Measure("mean(-d)", "k1 estimate of KL(mu||pi) per token; noisy, may be negative", verl="rollout_corr/kl"),
    "k3_kl": Measure("mean(exp(d) - 1 - d)", "k3 estimate of KL(mu||pi) per token; never negative", verl="rollout_corr/k3_kl"),
    "k3_saturated_frac": Measure("mean 1[d > 600]", "share of tokens whose exp(d) was cut at exp(600)"),
    "seq_k3_saturated_frac": Measure("mean_seq 1[S > 600]", "share of sequences whose exp(S) was cut at exp(600)"),
    "seq_kl": Measure("mean_seq(-S)", "k1 estimate of the sequence KL(mu||pi)"),
    "seq_k3_kl": Measure("mean_seq(exp(S) - 1 - S)", "k3 estimate of the sequence KL(mu||pi)"),
    "seq_logp_abs_diff_mean": Measure("mean_seq |S|", "mean gap in nats per sequence"),
    "seq_logp_abs_diff_max": Measure("max_seq |S|", "largest gap of any sequence"),
    "f_1.1": Measure("mean 1[max(r, 1/r) > 1.1]", "share of tokens whose probabilities differ by more than 10 %"),
    "f_2": Measure("mean 1[max(r, 1/r) > 2]", "share of tokens whose probabilities differ by more than a factor 2 (F(tau), arXiv 2510.11370)"),
    "ess_token": Measure("(sum r)^2 / (n sum r^2)", "effective sample size of token weights, in (0, 1]", verl="rollout_corr/rollout_is_eff_sample_size"),
    "ess_seq": Measure("(sum e^S)^2 / (m sum e^2S)", "effective sample size of sequence weights, in (0, 1]"),
    "chi2_token": Measure("mean r^2 - 1, d cut at +-20", "chi-square divergence per token", verl="rollout_corr/chi2_token"),
    "chi2_seq": Measure("mean_seq e^2S - 1, S cut at +-20", "chi-square divergence per sequence", verl="rollout_corr/chi2_seq"),
    "training_ppl": Measure("mean_seq exp(-l_pi), l = mean log-prob", "perplexity under the trainer", verl="rollout_corr/training_ppl"),
    "training_log_ppl": Measure("mean_seq(-l_pi)", "log-perplexity under the trainer", verl="rollout_corr/training_log_ppl"),
    "rollout_ppl": Measure("mean_seq exp(-l_mu)", "perplexity under the engine", verl="rollout_corr/rollout_ppl"),
    "rollout_log_ppl": Measure("mean_seq(-l_mu)", "log-perplexity under the engine", verl="rollout_corr/rollout_log_ppl"),
    "log_ppl_diff": Measure("mean_seq(l_mu - l_pi)", "difference of log-perplexities", verl="rollout_corr/log_ppl_diff"),
    "log_ppl_abs_diff": Measure("mean_seq |l_mu - l_pi|", "absolute difference of log-perplexities", verl="rollout_corr/log_ppl_abs_diff"),
    "log_ppl_diff_max": Measure("max_seq(l_mu - l_pi)", "largest difference of log-perplexities", verl="rollout_corr/log_ppl_diff_max"),
    "log_ppl_diff_min": Measure("min_seq(l_mu - l_pi)", "smallest difference of log-perplexities", verl="rollout_corr/log_ppl_diff_min"),
    "ppl_ratio": Measure("mean_seq exp(l_mu - l_pi)", "ratio of perplexities, trainer over engine", verl="rollout_corr/ppl_ratio"),
    "rollout_probs_diff_mean": Measure("mean |e^old - e^rollout|", "mean difference of probabilities", verl="training/rollout_probs_diff_mean"),
    "rollout_probs_diff_max": Measure("max |e^old - e^rollout|", "largest difference of probabilities", verl="training/rollout_probs_diff_max"),
    "rollout_probs_pearson": Measure("corr(e^old, e^rollout)", "correlation of probabilities; 1 when either is constant", verl="training/rollout_actor_probs_pearson_corr"),
    "support_truncated": Measure("1[top_p < 1 or top_k > 0 or min_p > 0]", "1 when the ratio is biased by truncated sampling, not by numerics alone; 0 under `mismatch.sampling_mask`"),
}  # fmt: skip


MITIGATION_MEASURES = {
    "lora_rounding": "LoRA under TRL: size of the errors of rounding W + BA to the engine's dtype over that of BA; 1 means that nothing is left",
    "weight_sync_gap": "mean |engine's prefill - trainer| of probe tokens after the last weight update, nats; verl: of the worst server",
    "doctor/unexplained": "mean size of what the doctor could not explain of an examined batch, nats per token; logged with that batch alone",
    "doctor/engine_ratio": "the engine's error there in units of the trainer's own rounding, by medians; 1 is healthy",
    "doctor/trainer_ratio": "the trainer's error in the same units",
    "sampling_mask_size": "tokens that were left to sample from, mean over the sampled tokens of a batch",
    "advantage_gap": "TRL: mean d of tokens with an advantage above 0 less that of tokens below, nats: rounding averages out in it (docs/stability.md)",
    "rejected_adv_shift": "TRL with weights of this package: mean size of what rejected responses add to the advantages of those that are kept, because they stay in their group's baseline; 0 is none",
    "phantom_clip_frac": "TRL with a clip on pi/mu: share of tokens that it stops at the weights that sampled, where the policy has not changed; should be 0",
    "loss_scale": "float16 loss scale after the last step",
    "overflow_steps": "steps whose float16 gradients overflowed, since training began",
    "overflow_streak": "of these the last ones in a row",
    "overflow_frac": "share of steps whose gradients overflowed",
    "skipped_steps": "verl: optimizer steps of the last update that the loss scaler skipped",
    "lr_multiplier": "factor on the host's rate that the last step applied",
    "lr_surges": "surges of the trigger that were found",
    "lr_surge_step": "step at which the first surge was found",
    "lr_surge_threshold": "value of the trigger above which a surge is found",
    "lr_period": "steps between two reductions, once known",
    "kl_coef": "coefficient of the batch's KL term",
    "kl_ref_k1": "k1 estimate of KL(pi||pi_ref) per token; TRL: in every update, of the policy that it starts from; verl: of the old policy",
    "kl_ref_k3": "k3 estimate of it; TRL: logged as `kl` too, TRL's own name",
    "turns": "TRL with tools: calls of the engine per completion, mean over a batch",
    "routing/sampled_rows": "TRL with tools: rows of routes of a batch that were recorded when their tokens were sampled",
    "routing/prefilled_rows": "TRL with tools: rows that a turn's prefill recorded, of prompts, tools and the last token of the turn before",
    "routing/rerouted_rows": "TRL with tools: rows of both that a later turn's prefill has routed otherwise; 0 in float32, and not replayed",
    "responses_cut_total": "TRL's AsyncGRPO: answers that a weight update has cut, and that went on with the new weights, since the last log",
    "routing/replayed_forwards": "verl: forward passes of the last step that were replayed",
}
"""What the mitigations log beside the gap, by name without prefix."""


STALENESS_MEASURES = {
    "numerics/<name>": "measures above of tokens of one version, v = w: what precision, kernels and routing make; no such name where unknown",
    "numerics/source": "where these tokens are from: 1 the batch, 2 TRL's AsyncGRPO: tokens sampled for it",
    "numerics/<source>/tokens": "tokens of one version that each source gave: `batch`, `buffer`; 0 where it was not asked, too",
    "numerics/<source>/logp_abs_diff_mean": "mean |rollout(v) - train(v)| of each source that has tokens; likewise `k3_kl`",
    "stale/<name>": "measures above of the batch's tokens of other or unknown versions: numerics and drift together",
    "staleness_mean": "mean w - v over tokens of known version, in weight updates; TRL's AsyncGRPO: in optimizer steps",
    "staleness_max": "largest w - v of a token",
    "same_version_frac": "share of the batch's tokens that were sampled by the very weights that score it",
    "mixed_routes_frac": "share of the batch's tokens that were sampled by these weights behind tokens of others, with replayed routes: no numerics",
    "unknown_version_frac": "share of the batch's tokens of which nobody says with which weights they were sampled",
}
"""What is logged where rollouts may be of older weights, by name without prefix."""
PARTS_OF_STALE = ("numerics/", "stale/")
"""What such figures of the gap's parts begin with."""


_SAMPLING = "sampling/importance_sampling_ratio/"
CORRECTION_MEASURES: dict[str, Measure] = {
    "rollout_is_mean": Measure("mean w", "mean weight of tokens, before it is normalised", verl="rollout_corr/rollout_is_mean", trl=_SAMPLING + "mean"),
    "rollout_is_max": Measure("max w", "largest weight: as bounded, of sequences before that", verl="rollout_corr/rollout_is_max", trl=_SAMPLING + "max"),
    "rollout_is_min": Measure("min w", "smallest weight, likewise", verl="rollout_corr/rollout_is_min", trl=_SAMPLING + "min"),
    "rollout_is_std": Measure("sqrt(mean w^2 - (mean w)^2)", "spread of the weights", verl="rollout_corr/rollout_is_std"),
    "rollout_is_eff_sample_size": Measure("(mean w)^2 / mean w^2", "effective sample size of the bounded weights, in (0, 1]", verl="rollout_corr/rollout_is_eff_sample_size"),
    "rollout_is_ratio_fraction_high": Measure("mean 1[rho > upper]", "share of ratios, of tokens or of sequences, above the upper bound", verl="rollout_corr/rollout_is_ratio_fraction_high"),
    "rollout_is_ratio_fraction_low": Measure("mean 1[rho < lower]", "share of ratios below the lower bound, or the inverse of the upper", verl="rollout_corr/rollout_is_ratio_fraction_low"),
    "rollout_is_oob_ratio": Measure("mean 1[w = 0]", "share of tokens whose ratio is outside both bounds of a mask", verl="rollout_corr/rollout_is_oob_ratio"),
    "rollout_is_batch_norm_factor": Measure("mean w", "what `normalize` divides by: the mean over tokens, or over sequences", verl="rollout_corr/rollout_is_batch_norm_factor"),
    "rollout_is_veto_fraction": Measure("mean_seq 1[min rho < veto]", "share of sequences that the veto drops"),
    "rollout_rs_masked_fraction": Measure("mean 1[rejected]", "share of tokens that are rejected", verl="rollout_corr/rollout_rs_masked_fraction"),
    "rollout_rs_seq_masked_fraction": Measure("mean_seq 1[rejected]", "share of sequences with a token that is rejected", verl="rollout_corr/rollout_rs_seq_masked_fraction"),
}  # fmt: skip
"""What every host logs of the weights of `correction`, by name without prefix, and what the hosts log of weights of their own."""


def tail_name(threshold: float) -> str:
    """Return the name of F(tau) for a threshold."""
    return f"f_{threshold:g}"


def _rows(measures: Mapping[str, Measure]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = []
    for name, m in measures.items():
        formula, meaning = (text.replace("|", "\\|") for text in (m.formula, m.meaning))
        lines.append(f"| `{name}` | {formula} | {meaning} | {m.verl and f'`{m.verl}`'} | {m.trl and f'`{m.trl}`'} |")
    return lines


def table() -> str:
    """Return the page of all measures as Markdown."""
    lines = [
        "# Metrics",
        "",
        "Printed by `python -m mismatch_ext.metrics`. Logged with the prefix `mismatch/` (in evaluation `eval_mismatch/`).",
        "",
        "d = old_logprob - rollout_logprob of a token that the rollout policy mu sampled, pi the trainer's policy at sampling",
        "time, r = exp(d), S the sum of d over a sequence. Means are over unmasked tokens; `mean_seq` over sequences. All",
        "arithmetic is float64: in float32 `exp(d)-1-d` is 100 % wrong at d = 1e-4, where an FP16 run lives.",
        "",
        "| name | formula | meaning | in verl | in TRL |",
        "|---|---|---|---|---|",
    ]
    lines += _rows(MEASURES)
    lines += [
        "",
        "## With routing replay",
        "",
        "The gap above is that under replay. Under R3 a share `mismatch.routing.measured` of the batches is scored once more under the",
        "trainer's own routing: the same measures of the tokens of those batches, as `native/<name>`. Of the same",
        "share of the replayed forward passes the model's own choice is kept as well and compared with",
        "the recorded one, layer by layer, each given the replayed experts of the layers before. These counts are over old-logprob",
        "and update passes: with several updates per batch they also hold how far the weights have moved.",
        "",
        "| name | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in ROUTING_MEASURES.items()]
    lines.append(
        f"| `{OTHER_PASSES}` | forward passes over other tokens than were recorded, such as those of an own loss over altered "
        "prompts, which the model routed itself; in `metrics.jsonl` from the first log on, 0 where there were none |"
    )
    lines.append(
        "| `routing/layer_<n>_set_mismatch` | share of tokens whose sets differ in layer n; in `metrics.jsonl` alone |"
    )
    lines += [
        "",
        "## Of the gap's growth",
        "",
        f"Logged from log number {LEAST} of a training on; where versions are followed, of `numerics/k3_kl`, as `numerics/<name>`.",
        "The slope is the median over all pairs of logs (Theil and Sen), its interval Sen's, widened where logs that follow each",
        "other are alike: neither is moved by a few batches of a heavy tail.",
        "",
        "| name | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in GROWTH_MEASURES.items()]
    lines += ["", "## Of the mitigations", "", "Logged where the section is on.", "", "| name | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |" for name, meaning in MITIGATION_MEASURES.items()]
    lines += [
        "",
        "## Of stale rollouts",
        "",
        "Logged where a trainer follows versions (docs/drift.md); the names above are then of the whole gap, which is corrected.",
        "With v the version of the weights that sampled a token and w that which scores it, rollout(v) - train(w) is numerics,",
        "rollout(v) - train(v), and drift, train(v) - train(w). See docs/drift.md. In synchronous runs v = w, and all of the gap is numerics.",
        "",
        "| name | meaning |",
        "|---|---|",
        *(f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |" for name, meaning in STALENESS_MEASURES.items()),
        "",
        "## Of the weights",
        "",
        "Logged in TRL where `correction` asks for what TRL has no setting for: the weights w and the rejection are then this",
        "package's. Where TRL has a setting, and always in verl, the trainer's own code weighs, and logs the names on the right alone.",
        "rho is the ratio pi/mu before bounds. verl also logs `rollout_is_seq_<figure>` and `rollout_rs_<rule>_<figure>`, and with an",
        "off-policy mask `off_policy_masked_fraction`; under `mode: bypass` all of them are means over micro-batches.",
        "",
        "| name | formula | meaning | verl's own | TRL's own |",
        "|---|---|---|---|---|",
        *_rows(CORRECTION_MEASURES),
    ]
    lines += [
        "",
        "## Under `mismatch.level: observe`",
        "",
        "`level: observe` tries the package on a run that you must not disturb. No section of the block acts, and the trainer's",
        "numbers are the same to the last bit. The run is measured as with an empty block. A check that fails logs a warning instead of",
        "ending the run, and counts in `observed/<check>`, logged from its first time on. The report lists these checks. Remove the",
        "line, and the block acts. The run still ends at its start if the block cannot be read, a package is not installed, or the run's",
        "folder cannot be written.",
        "",
        "## Of the host",
        "",
        "Report and alarms read these metrics of the host's own. An adapter writes their names into the header of a run; a loop of",
        'one\'s own writes those that differ from the roles\', such as `"names": {"length": "my/length"}`, or `"names": {}`. A header',
        "without `names` is taken for TRL's, or for verl's where its host is verl.",
        "",
        "verl's rate is the one that was applied where `lr` or a loss scaler is on; elsewhere stock verl logs the next step's, which",
        "the report draws one step later.",
        "",
        *roles_table(),
    ]
    return "\n".join(lines)
