"""verl's real loss, FSDP2 engine and checkpoint manager on a CPU, in processes without Ray and vLLM."""

from __future__ import annotations

import os

os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", VERL_LOGGING_LEVEL="ERROR")
os.environ.update(VERL_USE_EXTERNAL_MODULES="tests.peers.verl.cpu.platform")
# verl's own scaler stays disabled on a CPU, so that ours must do without a repair of it.
os.environ.setdefault("VERL_CPU_STOCK_SCALER", "1")
for name, alone in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
    os.environ.setdefault(name, alone)
