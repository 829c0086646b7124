"""What stands in the way of verl's whole Megatron engine on a CPU, beside what `megatron.cpu` takes out of megatron-core's.

The engine builds its model with Megatron-Bridge, whose layers are Transformer Engine's. Here they are megatron-core's own.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor, nn

from tests.peers.megatron import cpu as megatron_cpu

OVERRIDES = {
    # Grouped experts are a CUDA package, without which the model cannot be built.
    "moe_grouped_gemm": False,
    # Megatron-Bridge asks for a fused permutation of tokens, which only Transformer Engine has: the configuration is refused.
    "moe_permute_fusion": False,
}
"""For verl's `override_transformer_config`."""

CALLED: list[str] = []
"""Names of the stubs below that anybody has called, which must be none."""


class ImportStub(MetaPathFinder):
    """A stub of a package that only a GPU has, for the import of the modules that are named; nobody else sees it.

    Nothing in a stub works: what is made or called of it raises, and is written down.

    Args:
        readers: Modules that import the package without asking whether it is there.
        names: What they read from its modules while they are imported.
    """

    def __init__(self, readers: Sequence[str], names: Mapping[str, Sequence[str]]) -> None:
        self._readers, self._names = readers, names
        sys.meta_path.insert(0, self)

    def _modules(self) -> dict[str, types.ModuleType]:
        found = {module: types.ModuleType(module) for module in self._names}
        for module, names in self._names.items():
            found[module].__dict__.update({name: _refusing(f"{module}.{name}") for name in names})
            parent, _, leaf = module.rpartition(".")
            if parent:
                found[parent].__dict__[leaf] = found[module]
        return found

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Find a reader as everybody else would, and show it the stub while it runs."""
        if name not in self._readers:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            stubs = self._modules()
            sys.modules.update(stubs)
            try:
                run(module)
            finally:
                for stub in stubs:
                    del sys.modules[stub]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _refusing(name: str) -> type:
    """Return a class to derive from, to annotate with and to decorate with, whose instances cannot be called."""

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        CALLED.append(name)
        raise AssertionError(f"the stub of {name} was called")

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        if not (name == "triton.jit" and len(args) == 1 and not kwargs):  # a decorator is called by the import itself
            call(self)

    return type(name.rpartition(".")[2], (), {"__init__": make, "__call__": call, "__getitem__": call})


class NamedCuda(megatron_cpu.NamedCuda):
    """Makes on the CPU what is made on "cuda" by name, and calls it by that name again.

    Megatron's optimizers sort parameters by the strings "torch.cuda.FloatTensor" and "torch.cuda.BFloat16Tensor", and refuse
    all others. A GPU's tensors have these names.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


def local_layers(config: Any) -> Any:
    """Return megatron-core's own layers, with attention that takes packed samples."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class PackedAttention(DotProductAttention):  # type: ignore[misc]
        """megatron-core's attention, sample by sample: it refuses packed ones, which Transformer Engine's takes on a GPU."""

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
        ) -> Tensor:
            if packed_seq_params is None:
                return super().forward(query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
            bounds = packed_seq_params.cu_seqlens_q_padded.tolist()
            parts = []
            for start, end in zip(bounds[:-1], bounds[1:], strict=True):
                hidden = torch.triu(torch.ones(1, 1, end - start, end - start, dtype=torch.bool), 1)
                sample = (states[start:end, None] for states in (query, key, value))
                parts.append(super().forward(*sample, hidden))
            return torch.cat(parts)

    spec = local_layer_spec(config)
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def _export_single_experts() -> None:
    """Let Megatron-Bridge 0.3.1 export experts that are modules of their own.

    It reads an expert's number from what follows ".weight" in a parameter's name, where grouped experts, which a GPU has, keep
    it; those of megatron-core's own layers keep it before, and the export ends with a ValueError.
    """
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    gather = MegatronParamMapping.gather_from_ep_ranks

    def gather_from_ep_ranks(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.megatron_param
        head, found, tail = name.partition(".local_experts.")
        if not found:
            return gather(self, *args, **kwargs)
        number, _, rest = tail.partition(".")
        self.megatron_param = f"{head}.{rest}{number}"
        try:
            return gather(self, *args, **kwargs)
        finally:
            self.megatron_param = name

    MegatronParamMapping.gather_from_ep_ranks = gather_from_ep_ranks


def _load_into_fresh_optimizers() -> None:
    """Let Megatron's distributed optimizer load a checkpoint before its first step.

    Without Transformer Engine and Apex it steps with torch's Adam, which has no state before a first step, and asserts that
    there is one. Theirs, which a GPU has, keeps the number of steps elsewhere.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_state_dict

    def sharded_state_dict(self: Any, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return original(self, model_sharded_state_dict, is_loading, **kwargs)

    DistributedOptimizer.sharded_state_dict = sharded_state_dict


@contextmanager
def engine_in_float32() -> Iterator[None]:
    """Let verl build a Megatron engine in float32: its configuration alone refuses that dtype, the engine knows it."""
    from verl.workers.config import McoreEngineConfig

    check = McoreEngineConfig.__post_init__

    def check_but_dtype(self: Any) -> None:
        asked = self.dtype
        object.__setattr__(self, "dtype", "bfloat16")
        check(self)
        object.__setattr__(self, "dtype", asked)

    McoreEngineConfig.__post_init__ = check_but_dtype
    try:
        yield
    finally:
        McoreEngineConfig.__post_init__ = check


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Make verl's Megatron engine importable and runnable; to be entered before verl imports it."""
    megatron_cpu._shim()
    # Megatron-Bridge sends every model to the GPU, by name.
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign, assignment, misc]
    # Adapters of linear layers derive from Transformer Engine's; nobody here has adapters. Who asks first finds no such package.
    ImportStub(
        ("megatron.bridge.peft.lora_layers", "megatron.bridge.peft.lora"),
        {
            "transformer_engine": (),
            "transformer_engine.pytorch": ("Linear",),
            "transformer_engine.pytorch.ops": ("Sequential",),
        },
    )
    # Kernels for inference with Mamba layers, which Megatron-Bridge imports with every model that it knows.
    ImportStub(
        ("megatron.core.inference.contexts.attention_context.triton.tensor_ops",),
        {"triton": ("jit",), "triton.language": ("constexpr",)},
    )
    import megatron.bridge.models.gpt_provider as provider

    # Its default layers are Transformer Engine's; verl's configuration has no name for others.
    provider.transformer_engine_layer_spec = local_layers
    _export_single_experts()
    _load_into_fresh_optimizers()
    with NamedCuda():
        yield
