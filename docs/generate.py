"""Write the generated pages: `python docs/generate.py`. A test fails when a page is not current."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from mismatch_ext import config
from mismatch_ext.alarms import DEFAULTS
from mismatch_ext.drift import GROWTH_LEAST
from mismatch_ext.names import (
    CORRECTION_MEASURES,
    GROWTH_MEASURES,
    HOSTS,
    MEANINGS,
    MEASURES,
    MITIGATION_MEASURES,
    ROUTING_MEASURES,
    STALENESS_MEASURES,
    Measure,
)
from mismatch_ext.routing.agreement import OTHER_PASSES

HERE = Path(__file__).resolve().parent
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
HEAD = """\
# The `mismatch` block

Three blocks serve nearly everyone. Start with the first.

```yaml
mismatch: {level: observe}                # measure, change nothing
```

```yaml
mismatch: {precision: {dtype: float16}}   # close the gap
```

```yaml
mismatch:                                 # mixture of experts, asynchronous training, or what is left of the gap
  routing: {mode: R3}
  correction: {preset: token_truncate}
```

Add `lr: {}` if training breaks down when responses grow.

## How the block is read

`lr: {}` switches a section on with its defaults. To switch it off, leave it out. A section with nothing after it (`lr:` in
YAML, `null` in JSON or Hydra, None in a mapping) raises an error, because some mean "on" by it and others "off". `mismatch:
null` is no block. In Python, `MismatchConfig(lr=None)` leaves the section off, and every constructor checks its values as
the block does.

A key that is not listed here raises an error, and so does a key that is given twice. TRL's own YAML reader takes the last of
two equal keys before it passes the block on.

`python docs/generate.py` writes this page. `Action` is `"error"`, `"warn"` or `"off"`. `Number` is finite, `Positive` is
greater than 0, `Count` is a whole number of at least 1, `Text` is a string, and `Flag` is `true` or `false`."""


def fields(body: list[ast.stmt]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and docstring of each field of a dataclass body."""
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(following.value, ast.Constant)
            default = "required" if statement.value is None else ast.unparse(statement.value)
            default = {"field(default=None, hash=False)": "None"}.get(default, default)
            default = "{}" if default.startswith("field(") else default
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


def alarms_page() -> str:
    """Return the table of the built-in alarms."""
    about = [f"`{name}`" for name, rule in DEFAULTS.items() if rule.numerics]
    lines = [
        "# Built-in alarms",
        "",
        "Written by `python docs/generate.py`. Each warns after that many logs in a row. A value that is not finite is out of",
        "bounds under any of them. An alarm is over after as many logs in a row that are back by a fifth.",
        "`mismatch.monitor.alarms` changes them and adds others; `default_alarms: false` leaves on only those that it names.",
        "",
        f"{', '.join(about)} are about numerics. Where versions are followed (docs/drift.md) they watch",
        "`mismatch/numerics/...`, of tokens that were scored by the weights that sampled them, and nothing in a log without such",
        "tokens. Naming one in `alarms` changes nothing of that; for stale tokens give `stale/k3_kl` a threshold.",
        "",
        "With `mismatch.monitor.doctor: on_alarm` TRL's next batch after an alarm is examined for why the two sides differ",
        "(docs/doctor.md).",
        "",
        "Some metrics have another name in each host. You may name them by their role in all of them; a metric of that very name",
        "goes first:",
        "",
        *roles_table(),
        "",
        "| metric | out of bounds | logs in a row | it means that | what to do | source |",
        "|---|---|---|---|---|---|",
    ]
    for name, rule in DEFAULTS.items():
        source = rule.source.rstrip(".")
        lines.append(f"| `{name}` | {rule.bounds} | {rule.patience} | {rule.meaning} | {rule.advice} | {source} |")
    return "\n".join(lines)


def config_page() -> str:
    """Return the reference of the `mismatch:` block, read from the docstrings in `mismatch_ext/config.py`."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lines = [HEAD]
    for name, path in SECTIONS.items():
        lines += ["", f"## `{path}`", "", str(ast.get_docstring(classes[name])), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, annotation, default, meaning in fields(classes[name].body):
            text = " ".join(meaning.split())
            lines.append(f"| `{key}` | `{annotation.replace('|', chr(92) + '|')}` | `{default}` | {text} |")
    return "\n".join(lines)


def _rows(measures: Mapping[str, Measure]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = []
    for name, m in measures.items():
        formula, meaning = (text.replace("|", "\\|") for text in (m.formula, m.meaning))
        lines.append(f"| `{name}` | {formula} | {meaning} | {m.verl and f'`{m.verl}`'} | {m.trl and f'`{m.trl}`'} |")
    return lines


def metrics_page() -> str:
    """Return the page of all measures as Markdown."""
    lines = [
        "# Metrics",
        "",
        "Printed by `python docs/generate.py` from `mismatch_ext/names.toml`. Logged with the prefix `mismatch/` (in evaluation `eval_mismatch/`).",
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
        f"Logged from log number {GROWTH_LEAST} of a training on; where versions are followed, of `numerics/k3_kl`, as `numerics/<name>`.",
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


def roles_table() -> list[str]:
    """Return the roles, their meanings and each host's names for them, as lines of a Markdown table."""
    lines = [f"| role | meaning | {' | '.join(f'in {host}' for host in HOSTS)} |", "|---" * (2 + len(HOSTS)) + "|"]
    for role, meaning in MEANINGS.items():
        lines.append(f"| `{role}` | {meaning} | {' | '.join(f'`{names.of(role)}`' for names in HOSTS.values())} |")
    return lines


PAGES = {
    "alarms.md": alarms_page,
    "config.md": config_page,
    "metrics.md": metrics_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page() + "\n", encoding="utf-8")
