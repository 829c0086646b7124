"""Write the generated pages: `python docs/generate.py`. A test fails when a page is not current."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mismatch_ext import config
from mismatch_ext.metrics.names import table as metrics_page
from mismatch_ext.monitor.defaults import table as alarms_page

HERE = Path(__file__).resolve().parent
SECTIONS = {
    "MismatchConfig": "mismatch",
    "PrecisionConfig": "mismatch.precision",
    "LossScaleConfig": "mismatch.precision.loss_scale",
    "QuantizedConfig": "mismatch.precision.quantized",
    "CorrectionConfig": "mismatch.correction",
    "KlConfig": "mismatch.kl",
    "RoutingConfig": "mismatch.routing",
    "SamplingMaskConfig": "mismatch.sampling_mask",
    "LrConfig": "mismatch.lr",
    "MonitorConfig": "mismatch.monitor",
    "AlarmConfig": "mismatch.monitor.alarms.<metric>",
}


def fields(body: list[ast.stmt]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and docstring of each field of a dataclass body."""
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(following.value, ast.Constant)
            default = "required" if statement.value is None else ast.unparse(statement.value)
            default = "{}" if default.startswith("field(") else default
            yield ast.unparse(statement.target), ast.unparse(statement.annotation), default, str(following.value.value)


def config_page() -> str:
    """Return the reference of the `mismatch:` block, read from the docstrings in `mismatch_ext/config`."""
    classes = {
        node.name: node
        for module in sorted(Path(config.__file__).parent.glob("*.py"))
        for node in ast.parse(module.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    lines = [
        "# The `mismatch` block",
        "",
        "Printed by `python docs/generate.py` from `mismatch_ext/config`. A key that is not listed is an error, and so is one",
        'that is given twice. `Action` is `"error"`, `"warn"` or `"off"`.',
        "",
        "Write `lr: {}` to switch a section on with its defaults, and leave it out to switch it off. A section with nothing",
        "after it (`lr:` in YAML, `null` in JSON or Hydra, None in a mapping) is an error, because some mean on by it and",
        "others off. A block that is itself nothing (`mismatch: null` in the host's configuration) is no block. In Python,",
        "`MismatchConfig(lr=None)` leaves the section off, and every dataclass checks its values as the block does. TRL's own",
        "YAML reader takes the last of two equal keys before the block is read; verl's refuses them, and so does this package",
        "in texts and files of its own.",
    ]
    for name, path in SECTIONS.items():
        lines += ["", f"## `{path}`", "", str(ast.get_docstring(classes[name])), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, kind, default, meaning in fields(classes[name].body):
            lines.append(
                f"| `{key}` | `{kind}` | `{default}` | {' '.join(meaning.split())} |".replace(" | None`", " \\| None`")
            )
    return "\n".join(lines)


PAGES = {
    "alarms.md": alarms_page,
    "config.md": config_page,
    "metrics.md": metrics_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page() + "\n", encoding="utf-8")
