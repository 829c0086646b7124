"""What verl needs, besides its CPU platform, to roll out with SGLang on a CPU.

Loaded by verl in every process, after tests.peers.verl.cpu.platform in VERL_USE_EXTERNAL_MODULES. SGLang itself needs the
stand-ins of tests/peers/engines/sglang_cpu on PYTHONPATH.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.peers.verl.cpu import at_start  # noqa: F401  Python itself starts with the stand-ins' module
from tests.peers.verl.cpu.after_import import AfterImport


def share_by_file_name() -> None:
    """Let another program open the trainer's tensors.

    By default torch passes a CPU tensor as an open file, which only a process with the same multiprocessing key may ask
    for: SGLang's scheduler is no child of the trainer, and its read of the weights ends in an AuthenticationError. Memory
    of a GPU is passed as a CUDA handle, which needs neither.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")


def keep_torch_reductions() -> None:
    """Leave torch's way of passing tensors as it is.

    SGLang replaces the device in what torch passes by the GPU's UUID; for a CPU tensor there is none in it, and the
    weight update ends in an IndexError in the trainer.
    """

    def change(module: Any) -> None:
        module.monkey_patch_torch_reductions = lambda: None

    AfterImport("sglang.srt.utils.patch_torch", change)


def drop_seeds() -> None:
    """Drop the seed that the agent loop of the tests gives to each request.

    SGLang refuses the name, and its own seeds need its deterministic mode, which no attention backend of a CPU has. The
    agent loops of verl give none.
    """

    def change(module: Any) -> None:
        server = module.SGLangHttpServer
        original = server.generate

        @functools.wraps(original)
        async def generate(
            self: Any, prompt_ids: Any, sampling_params: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            unseeded = {name: value for name, value in sampling_params.items() if name != "seed"}
            return await original(self, prompt_ids, unseeded, *args, **kwargs)

        server.generate = generate

    AfterImport("verl.workers.rollout.sglang_rollout.async_sglang_server", change)


share_by_file_name()
drop_seeds()
keep_torch_reductions()
