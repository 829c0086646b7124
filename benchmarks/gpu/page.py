"""A run's figures as a page: what they were measured on and by, and every number of every part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def page(record: dict[str, Any], titles: dict[str, str], drawn: dict[str, list[str]]) -> str:
    """Return a record as Markdown.

    Args:
        record: As it is written to evidence.
        titles: Of each part, by its name.
        drawn: Of each part, names of its drawings beside the page.
    """
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    commit = "unknown" if record["commit"] is None else record["commit"][:10] + (", changed" if record["dirty"] else "")
    lines = [
        f"# {record['machine']['device']}",
        "",
        f"- **Measured**: {record['date']}, {record['seconds']} s; commit {commit}",
        f"- **With**: {versions}",
        f"- **By**: `{record['command']}`",
        f"- **Setting**: {', '.join(f'{key} {value}' for key, value in record['setting'].items() if value != '')}",
    ]
    if record["setting"]["quick"]:
        lines += ["", "A quick run: these figures say that the code runs, and nothing else."]
    for name, part in record["parts"].items():
        lines += ["", f"## {name}: {titles[name]}", ""]
        lines += [f"![{name}]({file})" for file in drawn[name]]
        lines += ["", f"{part['seconds']} s"]
        tables = {key: value for key, value in part["figures"].items() if _is_table(value)}
        single = {key: value for key, value in part["figures"].items() if key not in tables}
        lines += ["", *table(["figure", ""], list(flat(single)))]
        for key, value in tables.items():
            lines += ["", f"**{key}**", "", *compared(value)]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(entry, dict) and entry for entry in value.values())
    )


def compared(figures: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of a table of things that have the same figures; the longer side is that of the rows."""
    columns = {name: dict(flat(entry)) for name, entry in figures.items()}
    measures = list(dict.fromkeys(path for entry in columns.values() for path in entry))
    if len(measures) > len(columns):
        return table(["", *columns], [(m, *(entry.get(m, "") for entry in columns.values())) for m in measures])
    return table(["", *measures], [(name, *(entry.get(m, "") for m in measures)) for name, entry in columns.items()])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    first, *others = (f"| {' | '.join(line)} |" for line in lines)
    return [first, "|" + "---|" * len(head), *others]


def flat(figures: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield every figure with its path, for a reader; an interval is one."""
    if isinstance(figures, dict) and set(figures) == {"value", "low", "high"}:
        value, low, high = (number(figures[key]) for key in ("value", "low", "high"))
        yield ", ".join(path), f"{value} ({low} to {high})"
    elif isinstance(figures, dict):
        for key, value in figures.items():
            yield from flat(value, (*path, str(key)))
    elif isinstance(figures, list):
        yield ", ".join(path), ", ".join(map(number, figures)) or "none"
    else:
        yield ", ".join(path), number(figures)


def number(value: Any) -> str:
    """Return a value for a reader."""
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)
