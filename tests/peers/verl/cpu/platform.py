"""A CPU platform for verl, through verl's own registry, and the repairs that a CPU needs beside it.

Loaded by verl itself in every process, with VERL_USE_EXTERNAL_MODULES=tests.peers.verl.cpu.platform, or by importing
this module before anything asks verl for its platform. VERL_PLATFORM=cpu selects it and VERL_ENGINE_DEVICE=cuda makes
verl look up the engines that it registers for a GPU. Ray is told of GPUs that do not exist (ray_init.num_gpus).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from tests.peers.verl.cpu.after_import import AfterImport
from tests.peers.verl.cpu.one_kernel_experts import take_back_what_is_known
from tests.peers.verl.cpu.rollout_extension import keep_weights_reloadable

STOCK_SCALER = "VERL_CPU_STOCK_SCALER"
"""Set to 1 to leave the gradient scaler as it is on a CPU: silently disabled."""


def _device_module() -> types.ModuleType:
    """Return torch.cpu with what verl calls on torch.cuda besides."""
    module = types.ModuleType("torch_cpu_as_an_accelerator")
    module.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *_, **__: 0)
    for name in (
        *("empty_cache", "ipc_collect", "synchronize", "set_device"),
        *("reset_peak_memory_stats", "reset_max_memory_allocated"),
    ):
        setattr(module, name, lambda *_, **__: None)
    module.__dict__.update(
        mem_get_info=lambda *_, **__: (8 << 30, 16 << 30),
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda *_: "cpu",
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        is_available=lambda: True,
    )
    return module


_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One CPU in the place of one accelerator."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return _MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")  # verl passes it to Tensor.to, where an index would mean a GPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"  # of which Ray is given as many as the run asks for

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # verl then sends weights through shared memory

    def cudart(self) -> None:
        return None


def use_gloo() -> None:
    """Name the process group's backend: verl builds "cpu:gloo,<device>:<backend>", where "cpu" would stand twice."""
    import verl.utils.distributed as distributed

    original = distributed.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "gloo")

    distributed.initialize_global_process_group_ray = initialize


def hide_new_trl() -> None:
    """Let verl do without TRL 1.x: it imports a value head that only the older TRL it pins still has."""
    import verl.utils.import_utils as import_utils

    try:
        is_new = int(version("trl").split(".")[0]) >= 1
    except PackageNotFoundError:
        return
    if is_new:
        import_utils.is_trl_available = lambda: False


def never_pin_memory() -> None:
    """Offload without pinned memory, which needs a GPU; verl asks for it in every reference engine."""
    import torch.distributed.fsdp as fsdp

    class CPUOffloadPolicy(fsdp.CPUOffloadPolicy):
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory=False)

    class CPUOffload(fsdp.CPUOffload):
        def __init__(self, offload_params: bool = False) -> None:
            super().__init__(offload_params=False)  # FSDP1 pins whatever it offloads, and all is on the CPU in any case

    fsdp.CPUOffloadPolicy, fsdp.CPUOffload = CPUOffloadPolicy, CPUOffload
    for name in ("verl.utils.fsdp_utils", "verl.workers.engine.fsdp.transformer_impl"):
        if name in sys.modules:
            sys.modules[name].CPUOffloadPolicy = CPUOffloadPolicy


def shard_on_the_cpu() -> None:
    """Let FSDP1 synchronize a model on the CPU, and leave it there: it takes parameters on a CPU for a mistake."""
    import torch.distributed.fsdp._init_utils as building

    building._check_module_states_for_sync_module_states = lambda module_states: None

    def change(module: Any) -> None:
        original = module.load_fsdp_model_to_gpu

        @functools.wraps(original)
        def load(model: Any) -> None:
            # It asks for the device "cpu:cpu".
            if module.fsdp_version(model) != 1:
                original(model)

        module.load_fsdp_model_to_gpu = load

    AfterImport("verl.utils.fsdp_utils", change)


def enable_grad_scaler() -> None:
    """Scale gradients on the CPU: ShardedGradScaler() means a GPU, and without one it only warns and does nothing."""
    import torch.distributed.fsdp.sharded_grad_scaler as sharded

    class ShardedGradScaler(sharded.ShardedGradScaler):
        def __init__(self, device: str = "cpu", **settings: Any) -> None:
            super().__init__(device=device, **settings)

    sharded.ShardedGradScaler = ShardedGradScaler


def keep_sockets_apart() -> None:
    """Put the sockets of weight updates into this run's own folder.

    verl names them after Ray's job, and the first job of every local cluster has the same id: of two runs at once, one
    would take the other's weights.
    """
    own = os.environ.get("RAY_TMPDIR")
    if own is None:
        return

    def change(module: Any) -> None:
        for side in (module.BucketedWeightSender, module.BucketedWeightReceiver):
            side.__init__ = _in_folder(side.__init__, own)

    AfterImport("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", change)


def score_in_float32() -> None:
    """Take log-probabilities in float32, as flash-attn's kernel does on a GPU.

    Without flash-attn verl takes them in the dtype of the logits: in bfloat16 one of -8 is rounded to a multiple of 1/16.
    """

    def change(module: Any) -> None:
        original = module.logprobs_from_logits_v2

        @functools.wraps(original)
        def logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return original(logits.float(), labels)

        module.logprobs_from_logits_v2 = logprobs

    AfterImport("verl.utils.torch_functional", change)


def attend_without_flash_in_critics() -> None:
    """Build critics with torch's attention: verl names flash-attention for them, whatever the configuration says."""

    def change(module: Any) -> None:
        def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
            from transformers import AutoModelForTokenClassification

            return AutoModelForTokenClassification.from_pretrained(
                local_path,
                dtype=torch_dtype,
                config=model_config,
                attn_implementation="sdpa",
                trust_remote_code=trust_remote_code,
            )

        module.load_valuehead_model = load

    AfterImport("verl.utils.model", change)


def _in_folder(original: Any, folder: str) -> Any:
    @functools.wraps(original)
    def initialize(self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
        original(self, zmq_handle.replace("ipc:///tmp/", f"ipc://{folder}/"), *args, **kwargs)

    return initialize


use_gloo()
hide_new_trl()
never_pin_memory()
shard_on_the_cpu()
keep_sockets_apart()
score_in_float32()
attend_without_flash_in_critics()
take_back_what_is_known()
if os.environ.get(STOCK_SCALER) != "1":
    enable_grad_scaler()
# vLLM's workers have vLLM loaded when they import verl, and nobody else needs the repair.
if "vllm" in sys.modules:
    keep_weights_reloadable()
