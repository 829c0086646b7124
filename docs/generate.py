"""Write the generated tables of the pages, and their pictures: `python docs/generate.py`.

A test fails when a page or a picture is not current.
"""

from __future__ import annotations

import ast
import json
import math
import re
import runpy
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatch_ext import config
from mismatch_ext.alarms import DEFAULTS
from mismatch_ext.bad_rows import METRIC
from mismatch_ext.events import BAD_ROW_REASONS
from mismatch_ext.names import (
    CORRECTION_MEASURES,
    GROWTH_MEASURES,
    HOSTS,
    MEASURES,
    MITIGATION_MEASURES,
    ROUTING_MEASURES,
    SAMPLE_MEASURES,
    SHORT,
    STALENESS_MEASURES,
    Measure,
    Role,
)
from mismatch_ext.routing.agreement import OTHER_PASSES

HERE = Path(__file__).resolve().parent
EVIDENCE = HERE.parent / "evidence"
MARKED = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", flags=re.DOTALL)
SECTIONS = {
    "MismatchConfig": "mismatch",
    "PrecisionConfig": "mismatch.precision",
    "CorrectionConfig": "mismatch.correction",
    "KlConfig": "mismatch.kl",
    "RoutingConfig": "mismatch.routing",
    "SamplingMaskConfig": "mismatch.sampling_mask",
    "LrConfig": "mismatch.lr",
    "MonitorConfig": "mismatch.monitor",
    "AlarmConfig": "mismatch.monitor.alarms.<metric>",
}


def cell(text: str) -> str:
    """Return text as it stands in a cell of a Markdown table."""
    return text.replace("|", "\\|")


def table(*columns: str) -> list[str]:
    """Return the head of a Markdown table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def fields(body: list[ast.stmt]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and docstring of each field of a dataclass body."""
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(following.value, ast.Constant)
            default = "required" if statement.value is None else ast.unparse(statement.value)
            default = "{}" if default.startswith("field(default_factory") else default
            default = "the preset's" if "FROM_PRESET" in default else f"`{default}`"
            yield ast.unparse(statement.target), kind(statement.annotation), default, str(following.value.value)


def kind(annotation: ast.expr) -> str:
    """Return a type as text, with limits in words: `Number in 0 < x <= 1`."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    text = ast.unparse(annotation)
    for part in ast.walk(annotation):
        if isinstance(part, ast.Subscript) and ast.unparse(part.value) == "Annotated":
            assert isinstance(part.slice, ast.Tuple)
            base, *rest = part.slice.elts
            limits = [
                f"{signs[str(k.arg)]} {ast.unparse(k.value)}"
                for c in rest
                if isinstance(c, ast.Call)
                for k in c.keywords
            ]
            text = text.replace(ast.unparse(part), " ".join([ast.unparse(base), ", ".join(limits)]).strip())
    return text


def keys() -> list[str]:
    """Return the reference of the `mismatch:` block, read from the docstrings in `mismatch_ext/config.py`."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lines = []
    for name, path in SECTIONS.items():
        lines += [f"## `{path}`", "", str(ast.get_docstring(classes[name])), ""]
        lines += table("key", "type", "default", "meaning")
        for key, annotation, default, meaning in fields(classes[name].body):
            lines.append(f"| `{key}` | `{cell(annotation)}` | {default} | {' '.join(meaning.split())} |")
        lines.append("")
    return lines[:-1]


def measures(rows: Mapping[str, Measure]) -> list[str]:
    """Return a table of metrics with formulas, and the trainers' own names for them."""
    lines = table("name", "formula", "meaning", "trainer's own name")
    for name, m in rows.items():
        names = ", ".join(f"`{theirs}`" for theirs in (m.verl, m.trl) if theirs)
        lines.append(f"| `{name}` | {cell(m.formula)} | {cell(m.meaning)} | {names} |")
    return lines


def meanings(rows: Mapping[str, str]) -> list[str]:
    """Return a table of metrics with their meanings."""
    return table("name", "meaning") + [f"| `{name}` | {cell(meaning)} |" for name, meaning in rows.items()]


def short() -> list[str]:
    """Return the names of the metrics that consoles and loggers get by default."""
    return [", ".join(f"`{name}`" for name in SHORT) + "."]


def routing() -> list[str]:
    """Return the table of the metrics of routing replay."""
    return meanings(
        ROUTING_MEASURES
        | {
            OTHER_PASSES: "forward passes over other tokens than were recorded",
            "routing/layer_<n>_set_mismatch": "share of tokens whose sets differ in layer n; only in `metrics-*.jsonl`",
        }
    )


def alarms() -> list[str]:
    """Return the table of the built-in alarms."""
    lines = table("metric", "out of bounds", "logs in a row", "it means that", "source")
    for name, rule in DEFAULTS.items():
        metric = f"`{name}`{' †' * rule.numerics}"
        told = (metric, rule.bounds, str(rule.patience), rule.meaning, rule.source.rstrip("."))
        lines.append(f"| {' | '.join(told)} |")
    return lines


def scales() -> list[str]:
    """Return what each candidate for an alarm of the gap raised on runs with and without a fault."""
    (found,) = [record for record in evidence("alarms") if record["command"] == "python -m benchmarks alarms"]
    left_out = ("k3_median_low", "k3_median_growth_low", "log_odds_abs_diff_mean > 0.5")
    rows = [row for row in found["figures"] if "of clean" in row and not row["name"].startswith(left_out)]
    lines = table("alarm on", "raised without a fault", "fault missed", "logs until it is raised")
    for row in rows:
        delay = "" if row["median delay"] is None else f"{row['median delay']:g}"
        lines.append(
            f"| `{row['name']}` | {row['false']} of {row['of clean']} | {row['missed']} of {row['of faulty']} | {delay} |"
        )
    return lines


MEANINGS = {
    Role.REWARD: "mean reward of the batch's responses",
    Role.LENGTH: "their mean length in tokens",
    Role.LEARNING_RATE: "learning rate that the step applied",
    Role.LOSS: "loss of the step, whatever it is made of",
    Role.GRAD_NORM: "norm of its gradient before clipping",
    Role.ENTROPY: "mean entropy of the policy per token, in nats",
}


def roles() -> list[str]:
    """Return the roles, their meanings and each trainer's names for them."""
    lines = table("role", "meaning", *(f"in {host}" for host in HOSTS))
    for role, meaning in MEANINGS.items():
        lines.append(f"| `{role}` | {meaning} | {' | '.join(f'`{names.of(role)}`' for names in HOSTS.values())} |")
    return lines


def hooks(adapter: str) -> list[str]:
    """Return what an adapter relies on: what for, by which names, and how a run notices a change."""
    lines = table("name", "what for", "names, with the first parameters that we give", "how a run notices a change")
    folder = HERE.parent / "adapters" / adapter
    (file,) = (*folder.glob("seams.py"), *folder.glob("upstream.py"))
    for seam in runpy.run_path(str(file))["SEAMS"]:
        names = "<br>".join(f"`{claim.target}({', '.join(claim.params)})`".replace("()", "") for claim in seam.claims)
        lines.append(f"| [{seam.name}]({seam.upstream}) | {cell(seam.what)} | {names} | {cell(seam.checked)} |")
    return lines


SETS = {"eval/questions": "questions with one answer", "eval/open": "open requests"}
DENSE = {"bf16": "bf16", "fp16": "FP16", "fp32": "float32"}
MIXTURE = {"moe-bf16": "bf16", "moe-fp16": "FP16"}


def evidence(name: str) -> Any:
    """Return a record of the folder `evidence`."""
    return json.loads((EVIDENCE / f"{name}.json").read_text(encoding="utf-8"))


def rounded(value: float) -> str:
    """Return a figure with two digits, as tables have it."""
    return f"{value:.1e}".replace("e-0", "e-")


def with_interval(found: Mapping[str, float]) -> str:
    """Return a ratio with its 95 % interval: with a decimal if it is below 10."""
    digits = ".1f" if found["value"] < 10 else ".0f"
    value, low, high = (format(found[key], digits) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def real_gaps() -> list[str]:
    """Return the gaps of the real model by dtype."""
    figures = evidence("real_gap")["figures"]
    lines = table("prompts", *DENSE.values(), "bf16 / FP16", "k3 KL, bf16 / FP16", "tokens in each dtype")
    for split, title in SETS.items():
        gaps = [rounded(figures["mean |Δlogp|"][run][split]) for run in DENSE]
        ratios = [with_interval(figures["bf16 over fp16"][split][measure]) for measure in ("abs", "k3")]
        tokens = " / ".join(f"{figures['tokens'][run][split]:,.0f}" for run in DENSE)
        lines.append(f"| {title} | {' | '.join([*gaps, *ratios, tokens])} |")
    return lines


def real_mixture() -> list[str]:
    """Return what replay leaves of the gap of the mixture of experts that is made from the real model."""
    figures = evidence("real_gap")["figures"]
    measured = {run: dtype for run, dtype in MIXTURE.items() if run in figures["tokens"]}
    if not measured:
        return ["`make real` prints the figures. The record has none of the mixture yet."]
    lines = table(
        "both sides",
        "prompts",
        "mean, own routes",
        "mean, replayed",
        "share of k3 that replay leaves, 95 %",
        "flips",
        "tokens",
    )
    for run, dtype in measured.items():
        for split, title in SETS.items():
            before, after = figures["own routes and replayed"][run][split]["mean |Δlogp|"]
            share = figures[f"{run} left by replay"][split]["k3"]
            left = f"{share['value']:.2g} ({share['low']:.2g} to {share['high']:.2g})"
            flips, tokens = f"{figures['flips'][run][split]:.1%}", f"{figures['tokens'][run][split]:,.0f}"
            cells = [dtype, title, rounded(before), rounded(after), left, flips.replace("%", " %"), tokens]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def machine(record: Mapping[str, Any]) -> str:
    """Return the machine of a record."""
    name, *instructions = record["cpu"]
    return f"{record['cores']} cores of an {name} ({', '.join(instructions) or 'no AVX-512, no AMX'})"


def real_headline() -> list[str]:
    """Return the picture of README's first screen, and what it shows."""
    record = evidence("real_gap")
    gaps, counted = record["figures"]["mean |Δlogp|"], record["figures"]["tokens"]
    first, *_ = SETS
    found = ", ".join(f"{rounded(gaps[run][first])} in {dtype}" for run, dtype in DENSE.items())
    tokens = ", ".join(f"{sum(counted[run][split] for split in SETS):,.0f} in {dtype}" for run, dtype in DENSE.items())
    return [
        "![Mean difference of log-probabilities between TRL and vLLM on SmolLM2-135M, nats per token, questions with one answer: "
        f"{found}](docs/gap.svg)",
        "",
        "SmolLM2-135M-Instruct (weights dequantized from Q4_1) answers chat prompts. Both sides hold the same weights and",
        f"compute in the same dtype. Tokens of both sets of prompts: {tokens}.",
        f"Machine: {machine(record)}, shared with other jobs, no GPU.",
    ]


def heads() -> list[str]:
    """Return the gap of the real model by the dtypes of both output heads, in TRL and by the doctor."""
    lines = table(
        "engine's head", "trainer's head", "TRL: mean, k3", "TRL warned", "doctor: mean, k3", "doctor said", "tokens"
    )
    for case, parts in evidence("head")["figures"].items():
        engine, _, trainer = case.partition("-")
        trl, doctor = parts["trl"], parts.get("doctor")
        warned = "not run" if trl["warned"] is None else "of a one-sided head" if trl["warned"] else "no"
        found = [f"{part['logp_abs_diff_mean']:.4f}, {rounded(part['k3_kl'])}" for part in (trl, doctor or trl)]
        said = "not run" if doctor is None else ", ".join(doctor["causes"]) or doctor["verdict"]
        if doctor is not None and doctor["said"] and not doctor["causes"]:
            said += ", and noted the head"
        cells = [engine, trainer, found[0], warned, "" if doctor is None else found[1], said, f"{trl['tokens']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


SIZES = (
    "--config", "--model_name_or_path", "--output_dir", "--eval_prompts", "--max_steps", "--max_completion_length",
    "--dataset_name", "--reward_funcs", "--vllm_mode", "--vllm_max_model_length", "--vllm_gpu_memory_utilization",
    "--per_device_train_batch_size", "--gradient_checkpointing", "--logging_steps", "--report_to", "--save_strategy",
    "--num_generations", "--model", "--dataset", "--out", "--responses", "--max-tokens", "--engine-arg", "--json", "--steps",
    "--prompts",
)  # fmt: skip
"""Options that say where a run reads and writes, and how small it is; their values are left out of the table with them."""


def in_short(command: str) -> str:
    """Return a command without its options for files and sizes."""
    words, kept = shlex.split(command), list[str]()
    skips = False
    for word in words:
        skips = False if word.startswith("--") else skips
        if word in SIZES:
            skips = True
        elif not skips and "=runs/" not in word and f"={HERE.parent}" not in word:
            kept.append(word)
    return shlex.join(kept).replace("'\"'\"'", "'")


def real_flows() -> list[str]:
    """Return every flow on the real model: command, minutes, memory and what it printed."""
    lines = table("flow", "command, without files and sizes", "status", "minutes", "peak GB", "it printed")
    for flow in evidence("real")["figures"]:
        printed = "<br>".join(f"`{line}`" for line in flow["said"])
        name, command = f"`{flow['name']}`: {flow['title']}", f"`{in_short(flow['command'])}`"
        took = [f"{flow['minutes']:g}", f"{flow['peak_gb']:g}"] if flow["status"] == "passed" else ["", ""]
        cells = [name, cell(command), flow["status"], *took, cell(printed)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


NOT_RECORDED = "Nobody has recorded this yet."


def learned() -> Any:
    """Return the record of learning on the real model; None if there is none."""
    return evidence("real_learning") if (EVIDENCE / "real_learning.json").is_file() else None


def with_half_width(found: list[float]) -> str:
    """Return a mean with the half width of its interval."""
    return f"{found[0]:.2f} ± {found[1]:.2f}"


def real_learning() -> list[str]:
    """Return what the real model learned, by dtype and seed."""
    found = learned()
    if found is None:
        return [NOT_RECORDED]
    rows = found["figures"]
    lines = table(
        "both sides",
        "seed",
        "steps",
        "reward, first steps",
        "reward, last steps",
        "right answers, first / last",
        "mean \\|Δlogp\\|, first / last",
        "weight check, first / largest",
        "seconds a step",
    )
    for row in rows:
        rewards = [with_half_width(part) for part in row["reward"]]
        gaps, checks = (" / ".join(map(rounded, row[name])) for name in ("gap", "weight_check"))
        right = " / ".join(f"{share:.0%}".replace("%", " %") for share in row["right"])
        cells = [
            row["arm"],
            str(row["seed"]),
            str(row["steps"]),
            *rewards,
            right,
            gaps,
            checks,
            f"{row['seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    windows = sorted({row["window"] for row in rows})
    lines += ["", f"First and last steps: {' or '.join(map(str, windows))} of each run. Machine: {machine(found)}.", ""]
    lines += ["| runs | reward of the last steps, difference |", "|---|---|"]
    for pair in found["differences"]:
        one, other = pair["runs"]
        lines.append(f"| {one} less {other} | {pair['apart']:+.3f} |")
    lines += ["", "![Reward and gap of each step, by dtype and seed](../docs/learning.svg)"]
    return lines


STEP = "a step of 256 GPUs: "
"""What the rows of `python -m benchmarks scale` begin with that say what a step takes."""


def scale() -> list[str]:
    """Return what the parts of a large run cost, and what follows for a step of 256 GPUs."""
    (found,) = evidence("scale")
    step = [row for row in found["figures"] if row["name"].startswith(STEP)]
    units = [row for row in found["figures"] if row not in step]
    lines = table("a step of 256 GPUs", "seconds")
    lines += [f"| {row['name'].removeprefix(STEP)} | {row['seconds']:.2g} |" for row in step]
    lines += ["", *table("unit", "of", "seconds", "peak memory, MB")]
    for row in units:
        lines.append(f"| {row['name']} | {row['unit']} | {row['seconds']:.2g} | {row.get('megabytes', '')} |")
    return [*lines, "", f"Machine: {machine(found)}, shared with other jobs; commit {found['commit'][:8]}."]


COLORS = {"bf16": "#0072B2", "FP16": "#D55E00", "float32": "#009E73"}
FIRST_DECADE, LAST_DECADE = -6, -1
LEFT, DECADE = 250, 90
"""Where the axis begins, and the width of a decade, in pixels."""


def picture() -> str:
    """Return the picture of the real model's gap by dtype, as SVG."""
    gaps = evidence("real_gap")["figures"]["mean |Δlogp|"]
    title = "SmolLM2-135M, TRL and vLLM at the same weights: mean |Δlogp|, nats per token"
    first, *_ = SETS
    spoken = ", ".join(f"{rounded(gaps[run][first])} in {dtype}" for run, dtype in DENSE.items())
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 250" font-family="system-ui,sans-serif" font-size="13" '
        f'role="img" aria-label="{title}: {spoken}">',
        '<rect width="760" height="250" fill="#ffffff"/>',
        f'<text x="20" y="26" font-size="15" font-weight="600" fill="#1b1b1f">{title}</text>',
    ]
    for at, (split, prompts) in enumerate(SETS.items()):
        top = 45 + 86 * at
        lines.append(f'<text x="20" y="{top + 35}" fill="#1b1b1f">{prompts}</text>')
        for row, (run, dtype) in enumerate(DENSE.items()):
            gap, y = gaps[run][split], top + 24 * row
            width = round(DECADE * (math.log10(gap) - FIRST_DECADE))
            lines.append(
                f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end" fill="#55565c">{dtype}</text>'
                f'<rect x="{LEFT}" y="{y}" width="{width}" height="16" fill="{COLORS[dtype]}"/>'
                f'<text x="{LEFT + width + 6}" y="{y + 12}" fill="#1b1b1f">{rounded(gap)}</text>'
            )
    for decade in range(FIRST_DECADE, LAST_DECADE + 1):
        x = LEFT + DECADE * (decade - FIRST_DECADE)
        lines.append(
            f'<path d="M{x} 210v5" stroke="#55565c"/>'
            f'<text x="{x}" y="230" text-anchor="middle" fill="#55565c">1e{decade}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


WIDTH, HEIGHT, TOP = 300, 180, 50
"""Size of a panel of the picture of learning, and the place of its upper edge, in pixels."""
SMOOTHED = 10
"""Steps that are one point of a curve of rewards."""


def moving(values: list[float], steps: int) -> list[float]:
    """Return the mean of each value and those before it, of at most so many steps."""
    parts = [values[max(0, at - steps + 1) : at + 1] for at in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def panel(
    left: int, title: str, curves: list[tuple[str, list[float]]], ends: tuple[float, float], marks: list[str]
) -> list[str]:
    """Return curves between two values, each with its color, and what stands at the ends of the axis."""
    low, high = ends
    longest = max(len(values) for _, values in curves)
    lines = [
        f'<text x="{left}" y="{TOP - 10}" fill="#1b1b1f">{title}</text>',
        f'<path d="M{left} {TOP}v{HEIGHT}h{WIDTH}" fill="none" stroke="#55565c"/>',
        f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 18}" text-anchor="end" fill="#55565c">step {longest}</text>',
    ]
    for y, mark in zip((TOP + HEIGHT, TOP + 10), marks, strict=True):
        lines.append(f'<text x="{left - 6}" y="{y}" text-anchor="end" fill="#55565c">{mark}</text>')
    for color, values in curves:
        points = [
            f"{left + WIDTH * at / max(longest - 1, 1):.1f},{TOP + HEIGHT * (high - value) / (high - low):.1f}"
            for at, value in enumerate(values)
        ]
        lines.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    return lines


def picture_of_learning() -> str | None:
    """Return the picture of rewards and gaps by step, as SVG; None if there is no record."""
    found = learned()
    if found is None:
        return None
    rewards, gaps = list[tuple[str, list[float]]](), list[tuple[str, list[float]]]()
    for row in found["figures"]:
        color = COLORS[row["arm"]]
        rewards.append((color, moving(row["series"]["reward"], SMOOTHED)))
        gaps.append((color, [math.log10(value) for value in row["series"]["gap"] if value]))
    decades = (
        math.floor(min(min(values) for _, values in gaps)),
        math.ceil(max(max(values) for _, values in gaps)),
    )
    arms = dict.fromkeys(row["arm"] for row in found["figures"])
    named = "".join(f'<tspan fill="{COLORS[arm]}" font-weight="600"> {arm}</tspan>' for arm in arms)
    return "\n".join([
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 270" font-family="system-ui,sans-serif" font-size="13" '
        'role="img" aria-label="Reward and gap of each step, by dtype and seed">',
        '<rect width="760" height="270" fill="#ffffff"/>',
        f'<text x="50" y="20" fill="#1b1b1f">One line a seed:{named}</text>',
        *panel(50, f"reward, mean of {SMOOTHED} steps", rewards, (0.0, 1.0), ["0", "1"]),
        *panel(430, "mean |Δlogp|, nats per token", gaps, decades, [f"1e{decade}" for decade in decades]),
        "</svg>",
    ]) + "\n"  # fmt: skip


ENGINE, CHECK, TRAINER = 14, 265, 516
"""Left edges of the columns of the picture of a rollout, in pixels."""
COLUMN, BOX, PITCH, HEAD = 228, 48, 66, 70
"""Width of a column, height of a box, distance of two rows, and the place of the first row, in pixels."""
# What the engine does, what is checked between both sides and in which file of mismatch_ext, what the trainer does.
ROLLOUT: tuple[tuple[str, str, str, str], ...] = (
    ("start with its settings", "dtypes, sampling, hooks read back", "precision/audit.py", "start with its settings"),
    ("load the new weights", "probe tokens scored by both sides", "weights.py", "send the new weights"),
    ("sample tokens", "finite, in range, of these weights", "rollout.py", "count and leave out bad rows"),
    ("go on after a tool's answer", "turn N+1 extends turn N", "turns.py", "join the turns of a conversation"),
    ("report routes of experts", "the trace's tokens are the pass's", "routing/align.py", "score the same tokens, same routes"),
    ("report log-probabilities", "the gap: numerics apart from drift", "gap.py", "compare each token"),
    ("", "ratio of both policies bounded", "correction.py", "weigh or reject tokens"),
    ("", "the loss behaves as it must", "adapters/trl/behavior.py", "compute the loss"),
    ("", "finite gradients, one learning rate", "lr.py", "take the step"),
    ("", "metrics against their limits", "alarms.py", "log, warn, save"),
)  # fmt: skip


def box(left: int, top: int, text: str, color: str) -> str:
    """Return a box with a text in its middle."""
    return (
        f'<rect x="{left}" y="{top}" width="{COLUMN}" height="{BOX}" rx="6" fill="#ffffff" stroke="{color}" stroke-width="1.5"/>'
        f'<text x="{left + COLUMN // 2}" y="{top + 30}" text-anchor="middle" fill="#1b1b1f">{text}</text>'
    )


def arrow(start: int, end: int, y: int) -> str:
    """Return a horizontal arrow."""
    back = -6 if end > start else 6
    return f'<path d="M{start} {y}H{end}m{back} -4L{end} {y}l{back} 4" fill="none" stroke="#55565c"/>'


def picture_of_rollout() -> str:
    """Return the picture of one rollout through both sides, with the place of each check, as SVG."""
    height = HEAD + PITCH * len(ROLLOUT) + 26
    spoken = "; ".join(check for _, check, _, _ in ROLLOUT)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="system-ui,sans-serif" font-size="12" '
        f'role="img" aria-label="One rollout through engine and trainer. Checked, in this order: {spoken}">',
        f'<rect width="760" height="{height}" fill="#ffffff"/>',
    ]
    heads = {ENGINE: "rollout engine", CHECK: "checked between them", TRAINER: "trainer"}
    for left, head in heads.items():
        lines.append(
            f'<text x="{left + COLUMN // 2}" y="30" text-anchor="middle" font-size="15" font-weight="600" '
            f'fill="#1b1b1f">{head}</text>'
        )
    peers = {ENGINE: "vLLM, SGLang", CHECK: "file in mismatch_ext", TRAINER: "TRL, verl, your own loop"}
    for left, peer in peers.items():
        lines.append(f'<text x="{left + COLUMN // 2}" y="50" text-anchor="middle" fill="#55565c">{peer}</text>')
    for row, (engine, check, file, trainer) in enumerate(ROLLOUT):
        top = HEAD + PITCH * row
        middle = top + BOX // 2
        sends_weights = file == "weights.py"
        if engine:
            lines.append(box(ENGINE, top, engine, COLORS["bf16"]))
            ends = (CHECK, ENGINE + COLUMN) if sends_weights else (ENGINE + COLUMN, CHECK)
            lines.append(arrow(*ends, middle))
        ends = (TRAINER, CHECK + COLUMN) if sends_weights else (CHECK + COLUMN, TRAINER)
        lines += [
            arrow(*ends, middle),
            box(TRAINER, top, trainer, COLORS["FP16"]),
            f'<rect x="{CHECK}" y="{top}" width="{COLUMN}" height="{BOX}" rx="6" fill="#e8f5f0" stroke="{COLORS["float32"]}"/>'
            f'<text x="{CHECK + COLUMN // 2}" y="{top + 21}" text-anchor="middle" fill="#1b1b1f">{check}</text>'
            f'<text x="{CHECK + COLUMN // 2}" y="{top + 39}" text-anchor="middle" font-size="11" fill="#55565c">{file}</text>',
        ]
    # The loop closes: after the step, the weights go out again.
    last = HEAD + PITCH * (len(ROLLOUT) - 1) + BOX // 2
    sent = HEAD + PITCH + BOX // 2
    edge = TRAINER + COLUMN
    lines += [
        f'<path d="M{edge} {last}h10V{sent}h-10m6 -4l-6 4l6 4" fill="none" stroke="#55565c"/>',
        f'<text x="20" y="{height - 12}" fill="#55565c">The next step begins with the new weights. '
        "Without a config, none of this runs.</text>",
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


TABLES: dict[str, Callable[[], list[str]]] = {
    "keys": keys,
    "short": short,
    "gap": lambda: measures(MEASURES),
    "weights": lambda: measures(CORRECTION_MEASURES),
    "drift": lambda: meanings(STALENESS_MEASURES),
    "sample": lambda: meanings(SAMPLE_MEASURES),
    "growth": lambda: meanings(GROWTH_MEASURES),
    "mitigations": lambda: meanings(MITIGATION_MEASURES),
    "routing": routing,
    "bad_rows": lambda: meanings({METRIC + reason: meaning for reason, meaning in BAD_ROW_REASONS.items()}),
    "alarms": alarms,
    "scales": scales,
    "roles": roles,
    "hooks_trl": lambda: hooks("trl"),
    "hooks_verl": lambda: hooks("verl"),
    "hooks_vllm": lambda: hooks("vllm"),
    "hooks_torch": lambda: hooks("transformers"),
    "real_headline": real_headline,
    "real_gaps": real_gaps,
    "real_mixture": real_mixture,
    "real_flows": real_flows,
    "real_learning": real_learning,
    "heads": heads,
    "scale": scale,
}
PAGES = (
    *("../README.md", "config.md", "metrics.md", "real.md", "fp16.md"),
    *("../evidence/real.md", "../evidence/hooks.md", "../evidence/scale.md"),
)
PICTURES: dict[str, Callable[[], str | None]] = {
    "gap.svg": picture,
    "learning.svg": picture_of_learning,
    "rollout.svg": picture_of_rollout,
}
"""Pictures by file; a picture without a record is not drawn."""


def current(name: str) -> str:
    """Return a page with its tables as they should be."""
    text = (HERE / name).read_text(encoding="utf-8")
    return MARKED.sub(lambda m: "\n".join([f"<!-- table: {m[1]} -->", "", *TABLES[m[1]](), "", "<!-- end -->"]), text)


if __name__ == "__main__":
    for name in PAGES:
        (HERE / name).write_text(current(name), encoding="utf-8")
    for name, draw in PICTURES.items():
        drawn = draw()
        if drawn is not None:
            (HERE / name).write_text(drawn, encoding="utf-8")
