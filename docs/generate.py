"""Write the generated pages: `python docs/generate.py`. A test fails when a page is not current."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mismatch_ext import config
from mismatch_ext.alarms import DEFAULTS
from mismatch_ext.host_names import roles_table
from mismatch_ext.metrics.names import table as metrics_page

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


PAGES = {
    "alarms.md": alarms_page,
    "config.md": config_page,
    "metrics.md": metrics_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page() + "\n", encoding="utf-8")
