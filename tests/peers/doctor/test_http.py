"""`mismatch-ext doctor --server`: faults of real `vllm serve`, from what it answers over HTTP alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from mismatch_ext.adapters.doctor.examining import examine
from mismatch_ext.adapters.doctor.server import Address
from mismatch_ext.adapters.doctor.sides import Run

from mismatch_ext.doctor import Diagnosis
from tests.peers.doctor.faults import (
    CLEAN,
    CLEAN_EXPERTS,
    CONFIG,
    EXPERTS,
    HIDDEN,
    PROMPT,
    REQUESTS,
    RESPONSES,
    WEIGHTS,
    Engines,
    Planted,
    cannot,
    plant,
    said,
    some,
    unsound,
    wrong,
)
from tests.peers.engines.vllm_server import serving

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1500)]
# What a server is not asked to take back: its start.
STARTED = {"config", "weights", "cache", "experts"}


class Servers:
    """Keeps the server of a run for the next one, where that would start the same."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._key, self._stack, self._url = folder, "", ExitStack(), ""

    def url(self, run: Run, experts: bool) -> str:
        """Return the address of a server with a run's settings; one that was started for another is ended first."""
        arguments = {"dtype": run.dtype, "logprobs_mode": "processed_logprobs", **run.arguments}
        served, flags = run.engine_model or run.model, ["--enable-return-routed-experts"] if experts else []
        for name, value in arguments.items():
            flags += [f"--{name.replace('_', '-')}", str(value)]
        key = repr((served, flags))
        if key != self._key:
            self.end()
            self._url, self._key = self._stack.enter_context(serving(served, self._folder, *flags)), key
        return self._url

    def end(self) -> None:
        """End what runs."""
        self._stack.close()
        self._key = ""


def examined(planted: Planted, folder: Path, servers: Servers) -> Diagnosis:
    """Plant a fault in a server or in what it is asked, and have the doctor ask it."""
    run, prompts, seen = plant(planted, folder, Engines())
    known: dict[str, Any] = {part.name: getattr(run, part.name) for part in fields(Run)}
    address = Address(url=servers.url(run, planted.kind == "moe"))
    asked = Run(**known | {"server": address, "engine_model": None, "arguments": {}})
    return examine(asked, prompts, responses=RESPONSES, max_tokens=planted.tokens, seen=seen)


def table(runs: Mapping[str, Planted], folder: Path) -> dict[str, str]:
    """Return what each fault was called and how sure that is over HTTP, and hold that the names are right."""
    found, mistakes, servers = {}, [], Servers(folder)
    try:
        for number, (name, planted) in enumerate(runs.items()):
            if reason := cannot(planted):
                found[name] = reason
                continue
            (folder / str(number)).mkdir()
            seen = examined(planted, folder / str(number), servers)
            found[name] = "; ".join(said(seen))
            mistakes += [
                f"{name}: {mistake}: {found[name]}"
                for mistake in (wrong(planted, seen), unsound(seen), unfit(seen))
                if mistake
            ]
    finally:
        servers.end()
    assert not mistakes, "\n".join(mistakes)
    return found


def unfit(found: Diagnosis) -> str:
    """Return what is wrong with how sure the names are: causes of a server's start stay fits, with the reason said."""
    started = [cause for cause in found.causes if cause.family in STARTED]
    if any(cause.status == "confirmed" for cause in started):
        return "a cause of the server's start was confirmed without another start"
    mendable = [cause.key for cause in started if cause in found.mendable]
    if mendable and not any("takes a start of the engine" in note for note in found.notes):
        return f"the report does not say why {mendable} stay fits"
    return ""


def stock(planted: Planted) -> Planted:
    """Return a fault of a server that reports log-probabilities as stock vLLM does, from before the sampling settings."""
    return replace(planted, run={**planted.run, "arguments": {"logprobs_mode": "raw_logprobs"}})


def test_faults_of_requests_are_named_over_http(tmp_path: Path) -> None:
    """Over HTTP alone the doctor names and confirms other sampling settings, and names nothing on a clean run."""
    table(some(CLEAN, "clean") | REQUESTS, tmp_path)


def test_faults_are_named_with_a_stock_server(tmp_path: Path) -> None:
    """Of a stock server's raw log-probabilities the doctor names other prompts, hidden sampling settings, and no clean run."""
    runs = some(CLEAN, "clean") | some(PROMPT, "an extra token first", "a prompt without its first 2 tokens") | HIDDEN
    runs = {name: stock(planted) for name, planted in runs.items()}
    table(runs, tmp_path)


def test_faults_of_a_server_are_named_over_http(tmp_path: Path) -> None:
    """Over HTTP alone the doctor names a server's other configuration, weights, cache and dtype, without a start as fits."""
    runs = some(CONFIG, "rope_theta x 1.13") | some(WEIGHTS, "fp8 KV cache", "fp8 weights")
    runs |= some(WEIGHTS, "the last of three older checkpoints", "engine float16, trainer bfloat16")
    table(runs, tmp_path)


def test_faults_with_experts_are_named_over_http(tmp_path: Path) -> None:
    """Over HTTP alone, by the routes that a server sends, the doctor names experts of another weight, and no clean run."""
    runs = some(CLEAN_EXPERTS, "clean, experts") | some(EXPERTS, "experts x 1.08")
    table(runs, tmp_path)
