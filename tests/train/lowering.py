"""FlexAttention's calls of a training run, lowered and compiled as for a GPU, on a machine without one.

    python -m tests.train.lowering 90       # every shape for a compute capability: 280 cases, about 20 minutes

Inductor is told of a GPU that isn't there; the graph, traced on the CPU, is then said to be on it. What comes out is
the Triton code that the GPU would get; Triton and ptxas turn its attention kernels into machine code. The fakes change
PyTorch for the whole process: the tests run this file as a process of its own (cases on stdin, answers on stdout).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from peagle.layout import full
from peagle.train import flex
from peagle.train.attention import MaskSlots

GPU = torch.device("cuda", 0)
# Bytes of shared memory that a program may have, by compute capability.
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of a run."""

    capability: int
    heads: int
    kv_heads: int
    head_dim: int
    num_queries: int
    is_base: bool = False
    """The base pass instead of a rollout."""
    with_grad: bool = True
    dtype: str = "bfloat16"
    is_compiled: bool = False
    """To machine code, which takes three to eight seconds more."""


# Group sizes 1, 2, 4, 7 and 8; lengths around those that Inductor treats apart.
ALL = [
    Case(capability=0, heads=heads, kv_heads=kv_heads, head_dim=head_dim, num_queries=num_queries, is_base=is_base)
    for (heads, kv_heads), head_dim, num_queries, is_base in itertools.product(
        [(4, 4), (16, 8), (32, 8), (28, 4), (64, 8)], [64, 80, 128, 256], [1, 20, 33, 90, 127, 130, 700], [False, True]
    )
]


def pretend(capability: int) -> None:
    """Have PyTorch and Triton believe in such a GPU. For good: the process is lost for anything else."""
    import torch._dynamo.device_interface
    import triton.runtime
    from triton.backends.compiler import GPUTarget

    properties = mock.Mock(spec=[], name="properties")
    numbers = {
        "name": f"sm_{capability}", "major": capability // 10, "minor": capability % 10, "warp_size": 32,
        "multi_processor_count": 132, "total_memory": 80 << 30, "max_threads_per_multi_processor": 2048,
        "max_threads_per_block": 1024, "regs_per_multiprocessor": 65536, "L2_cache_size": 50 << 20,
        "shared_memory_per_block_optin": SHARED_MEMORY[capability], "shared_memory_per_block": 49152,
        "shared_memory_per_multiprocessor": 233_472, "gcnArchName": "",
    }  # fmt: skip
    for name, number in numbers.items():
        setattr(properties, name, number)
    answers = {
        "get_device_properties": properties,
        "get_device_capability": (capability // 10, capability % 10),
        "get_compute_capability": capability,
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "is_bf16_supported": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }
    interface = torch._dynamo.device_interface.CudaInterface
    for name, answer in answers.items():
        for place in (torch.cuda, interface, interface.Worker):
            if hasattr(place, name) and not (place is torch.cuda and name == "is_available"):
                setattr(place, name, staticmethod(lambda *_a, _answer=answer, **_k: _answer))
    torch.version.cuda = "12.8"
    for name in dir(torch.utils._triton):
        if name.startswith("has_triton"):
            setattr(torch.utils._triton, name, lambda *_, _has=name in ("has_triton", "has_triton_package"): _has)
    driver = mock.Mock()
    driver.get_current_target.return_value = GPUTarget("cuda", capability, 32)
    driver.get_current_device.return_value = 0
    driver.get_active_torch_device.return_value = GPU
    driver.utils.get_device_properties.return_value = {
        "max_shared_mem": SHARED_MEMORY[capability], "multiprocessor_count": 132, "warpSize": 32
    }  # fmt: skip
    triton.runtime.driver.set_active(driver)
    # The call is traced with tensors of the CPU, where gradients are refused and their statistics left out.
    flex_module: Any = sys.modules["torch.nn.attention.flex_attention"]
    flex_module._validate_device = lambda *_: None
    options = flex_module._apply_kernel_options
    flex_module._apply_kernel_options = lambda *a, **k: {
        **options(*a, **k), "OUTPUT_LOGSUMEXP": torch.is_grad_enabled()
    }  # fmt: skip


class Lowering:
    """A backend of `torch.compile`: keeps the Triton code of a graph's forward and backward, and runs it as it is."""

    def __init__(self) -> None:
        self.code: dict[str, str] = {}

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        def compiler(name: str) -> Any:
            def compile_(part: torch.fx.GraphModule, part_inputs: list[Any]) -> Any:
                self.code.setdefault(name, self._lowered(part, part_inputs, is_backward=name == "backward"))
                return make_boxed_func(part.forward)

            return compile_

        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def _lowered(graph: torch.fx.GraphModule, inputs: list[Any], is_backward: bool) -> str:
        from torch._inductor.debug import DebugContext
        from torch._inductor.graph import GraphLowering
        from torch._inductor.virtualized import V

        mode = torch._guards.detect_fake_mode(inputs)

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=GPU)

        with torch.no_grad(), mode, mock.patch.object(torch.cuda, "is_available", return_value=True):
            for part in graph.modules():
                for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                    if node.kwargs.get("device") is not None:
                        node.kwargs = {**node.kwargs, "device": GPU}
                    if "val" in node.meta and node.op != "get_attr":
                        node.meta["val"] = torch.utils._pytree.tree_map(moved, node.meta["val"])
            moved_inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
            lowering = GraphLowering(
                graph, example_inputs=moved_inputs, shape_env=mode.shape_env, is_backward=is_backward
            )
            with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()), DebugContext():
                lowering.run(*moved_inputs)
                code: Any = lowering.codegen()
        return str(getattr(code[0], "value", code[0]))


def lower(case: Case) -> dict[str, str]:
    """The code of a call's forward, and with gradients of its backward."""
    length = max(case.num_queries, 300)
    if case.is_base:
        length, position = case.num_queries, torch.arange(case.num_queries)
        mask, num_keys = flex.plan_blocks(position, None, torch.zeros_like(position), 0, length).mask, length
    else:
        layout = full(torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.int64), 4)
        anchor, depth = layout.anchor_pos[: case.num_queries], layout.depth[: case.num_queries]
        slots = MaskSlots(
            anchor=anchor, depth=depth, doc_start=torch.zeros_like(anchor), first=0, last=int(anchor[-1]) + 1
        )
        mask, num_keys = (
            flex.plan_blocks(slots.anchor, slots.depth, slots.doc_start, slots.first, slots.last - slots.first).mask,
            slots.padded.shape[1],
        )
    torch._dynamo.reset()
    backend = Lowering()
    dtype = getattr(torch, case.dtype)
    options = flex.kernel_options(GPU, case.head_dim, dtype)
    shapes = [(case.heads, case.num_queries), (case.kv_heads, num_keys), (case.kv_heads, num_keys)]
    q, k, v = (torch.randn(rows, heads, case.head_dim, dtype=dtype).transpose(0, 1)[None] for heads, rows in shapes)
    with torch.set_grad_enabled(case.with_grad):
        q, k, v = (x.requires_grad_(case.with_grad) for x in (q, k, v))
        out = flex.padded_call(flex.compiled(backend), q, k, v, mask, kernel_options=options)
    if case.with_grad:
        out.float().sum().backward()
    return backend.code


def kept(found: dict[str, Any], **options: Any) -> Any:
    """Stands for Inductor's decorator of a kernel: what it is told, and the kernel, go into `found`."""

    def keep(kernel: Any) -> Any:
        found.update(options, kernel=kernel)
        return kernel

    return keep


def shared_memory(code: str, capability: int) -> list[int]:
    """Compile the attention kernels of some code; the bytes of shared memory of each."""
    import triton
    from torch._inductor.runtime import triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    used = []
    for source in re.findall(r"async_compile\.triton\('\w+', '''(.*?)''', device_str", code, re.S):
        if "@triton_heuristics.template" not in source:
            continue
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.py"
            path.write_text(source, encoding="utf-8")
            spec = importlib.util.spec_from_file_location("kernel", path)
            assert spec is not None
            assert spec.loader is not None
            with mock.patch.object(triton_heuristics, "template", partial(kept, found)):
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
            meta = found["triton_meta"]
            names = found["kernel"].arg_names
            signature = {name: meta["signature"].get(name, "constexpr") for name in names}
            compiled = triton.compile(
                ASTSource(
                    found["kernel"],
                    signature,
                    {(names.index(name),): value for name, value in meta.get("constants", {}).items()},
                    meta["configs"][0],
                ),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": found["num_warps"], "num_stages": found["num_stages"]},
            )
        used.append(compiled.metadata.shared)
    return used


def solve(case: Case) -> dict[str, Any]:
    """What became of a case: names of the parts that were lowered, shared memory of each kernel, or the error."""
    began = time.monotonic()
    try:
        code = lower(case)
        used = [n for part in code.values() for n in shared_memory(part, case.capability)] if case.is_compiled else []
    except Exception as error:  # whatever Inductor or Triton raise is the answer
        return {"error": f"{type(error).__name__}: {error}"[:2000], "seconds": time.monotonic() - began}
    return {"parts": sorted(code), "shared_memory": used, "seconds": time.monotonic() - began}


def main() -> None:
    """Solve the cases on stdin, all of one capability; with a capability as argument, print all of it."""
    if len(sys.argv) == 1:
        cases = [Case(**case) for case in json.load(sys.stdin)]
        pretend(cases[0].capability)
        print(json.dumps([solve(case) for case in cases]))
        return
    capability = int(sys.argv[1])
    pretend(capability)
    failed = 0
    for case in ALL:
        # Lengths don't change the machine code: it is made once for a shape of heads.
        is_compiled = case.num_queries == 700 and not case.is_base
        answer = solve(replace(case, capability=capability, is_compiled=is_compiled))
        failed += "error" in answer or max(answer["shared_memory"], default=0) > SHARED_MEMORY[capability]
        print(json.dumps(asdict(case) | answer), flush=True)
    sys.exit(f"{failed} of {len(ALL)} failed" if failed else 0)


if __name__ == "__main__":
    main()
