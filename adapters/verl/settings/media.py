"""Data with images, video or audio, whose routes cannot be replayed: found in verl's data files before Ray starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.verl.settings.refusals import refused
from omegaconf import DictConfig, OmegaConf

from mismatch_ext.config import MismatchConfig

KEYS = {"image_key": "images", "video_key": "videos", "audio_key": "audios"}
"""Settings that name the column of a medium, and verl's defaults."""


def check_media(config: DictConfig, block: MismatchConfig) -> None:
    """Refuse routing for data with images, video or audio, as far as its files show it.

    Media that files do not show (a dataset class of the user's own, files that are not here) are refused by the worker's first
    pass, and by SGLang's servers at the request.

    Args:
        config: All of verl's configuration.
        block: The parsed block.

    Raises:
        ConfigError: The first row of a file has images, video or audio.
    """
    if block.routing is None:
        return
    for setting in ("data.train_files", "data.val_files"):
        given: Any = OmegaConf.select(config, setting)
        for file in [given] if isinstance(given, str) else list(given or ()):
            for name, default in KEYS.items():
                column = OmegaConf.select(config, f"data.{name}") or default
                if _first(Path(str(file)), column):
                    why = (
                        f"{setting} has {column!r} (data.{name}) in {file}, and no token id tells what they show, so that a pass "
                        "of the trainer cannot be shown to be the one that its routes are of"
                    )
                    raise refused(
                        "mismatch.routing.mode",
                        block.routing.mode,
                        "text alone",
                        why,
                        "Remove mismatch.routing for this data",
                    )


def _first(file: Path, column: str) -> Any:
    """Return what the first row of a file has in a column; None where there is no such row, column or file."""
    if not file.is_file():
        return None
    if file.suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.ParquetFile(file)
        if column not in rows.schema_arrow.names:
            return None
        batch = next(rows.iter_batches(batch_size=1, columns=[column]), None)
        return None if batch is None or not batch.num_rows else batch.column(0)[0].as_py()
    if file.suffix in (".json", ".jsonl"):
        with file.open(encoding="utf-8") as lines:
            line = lines.readline()
        try:
            row = json.loads(line)
        except ValueError:
            return None  # one array over many lines: the worker's first pass refuses media in it
        return row.get(column) if isinstance(row, dict) else None
    return None
