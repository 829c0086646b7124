"""Markdown for the page of KL configurations."""

from __future__ import annotations


def number(value: float) -> str:
    """Return three significant digits, and 0 for what only rounding keeps from it."""
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; bars inside cells are escaped."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def bold_least(columns: list[list[float]]) -> list[list[str]]:
    """Return the columns as rows of text, the least figures of each column in bold."""
    texts = [
        [f"**{number(value)}**" if value <= min(column) * (1 + 1e-9) else number(value) for value in column]
        for column in columns
    ]
    return [list(row) for row in zip(*texts, strict=True)]
