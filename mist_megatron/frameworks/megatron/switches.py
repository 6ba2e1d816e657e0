"""Flags of megatron-core 0.19 for overlaps of experts, CUDA graphs, recipes of 8 and 4 bits, and narrow
optimizer states: switches of a plan's `execution` that are Megatron's own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mist_megatron.frameworks.flags import Flags, flag, when
from mist_megatron.spec.kinds import Quantization
from mist_megatron.spec.plan import Execution, Plan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.megatron_offload import USUAL_LEAST_ELEMENTS, least_elements
from mist_megatron.targets.megatron_switches import master_bytes

FP8_HISTORY = 1024
"""Values of which the largest scales what is cast next, by delayed scaling."""
RECIPES: Mapping[Quantization, Flags] = MappingProxyType(
    {
        "delayed": (
            flag("--fp8-format", "hybrid"),
            flag("--fp8-recipe", "delayed"),
            flag("--fp8-amax-history-len", FP8_HISTORY),
            flag("--fp8-amax-compute-algo", "max"),
        ),
        "tensorwise": (flag("--fp8-format", "hybrid"), flag("--fp8-recipe", "tensorwise")),
        "blockwise": (flag("--fp8-format", "e4m3"), flag("--fp8-recipe", "blockwise")),
        "mxfp8": (flag("--fp8-format", "e4m3"), flag("--fp8-recipe", "mxfp8")),
        "nvfp4": (flag("--fp4-format", "e2m1"), flag("--fp4-recipe", "nvfp4")),
    }
)
"""Each as NVIDIA's recipes use it; of delayed scaling Megatron's default is the most recent value alone."""


def precision_flags(training: TrainingSpec, execution: Execution) -> Flags:
    """fp8 is a layer on bf16: delayed scaling, which every GPU with fp8 has, unless the plan says another."""
    if training.precision == "fp16":
        return (flag("--fp16"),)
    recipe = RECIPES[execution.quantization or "delayed"] if training.precision == "fp8" else ()
    return (flag("--bf16"), *recipe, *_narrow_weights(execution))


def _narrow_weights(execution: Execution) -> Flags:
    """Updated weights of MXFP8 are gathered in 16 bits, into the buffer of gradients unless Megatron-FSDP
    shards them; else they would need one of their own."""
    if not execution.fp8_param_gather:
        return ()
    shared = execution.quantization == "mxfp8" and not execution.megatron_fsdp
    return (flag("--fp8-param-gather"), *when(shared, flag("--reuse-grad-buf-for-mxfp8-param-ag")))


def overlap_flags(execution: Execution) -> Flags:
    """What runs beside tokens that travel to experts and back."""
    return (
        *when(bool(execution.expert_overlap), flag("--overlap-moe-expert-parallel-comm")),
        *when(bool(execution.delayed_weight_grad), flag("--delay-wgrad-compute")),
        *when(bool(execution.shared_expert_overlap), flag("--moe-shared-expert-overlap")),
    )


def graph_flags(execution: Execution) -> Flags:
    """What is launched once and replayed; no module means all of a layer. Megatron looks for values that are
    none with the host, which a graph of the whole step excludes."""
    graphs = execution.cuda_graphs
    if not graphs:
        return ()
    if "full_iteration" in graphs:
        return flag("--cuda-graph-impl", "full_iteration"), flag("--no-check-for-nan-in-loss-and-grad")
    modules = tuple(module for module in graphs if module != "layer")
    impl = flag("--cuda-graph-impl", "transformer_engine")
    return impl, *when(bool(modules), flag("--cuda-graph-modules", *modules))


INFLIGHT = "fine-grained-offloading-max-inflight-offloads"
COPIES_BEHIND = 1
"""Layers whose copies of a module are still on their way when the next one's begin, before compute waits."""


def offloaded_flags(plan: Plan) -> Flags:
    """Modules whose saved activations leave for host memory. Megatron itself lets copies fall behind without
    end, and what waits for them stays on the GPU; tensors below its least size stay there too."""
    modules = plan.execution.offload_modules
    if not modules:
        return ()
    least = least_elements(plan)
    return (
        flag("--fine-grained-activation-offloading"),
        flag("--offload-modules", *modules),
        flag(f"--{INFLIGHT}", COPIES_BEHIND),
        *when(least < USUAL_LEAST_ELEMENTS, flag("--min-offloaded-tensor-size", least)),
    )


def offload_environment(plan: Plan) -> dict[str, str]:
    """Without it Transformer Engine from 2.10 on would send weights too (training/arguments.py:1857)."""
    return {"NVTE_CPU_OFFLOAD_V1": "1"} if plan.execution.offload_modules else {}


MOMENTS: Mapping[int, str] = MappingProxyType({8: "fp32", 4: "bf16", 2: "fp8"})
"""Bytes of both moments -> what each is kept in."""


def keeps_narrow(plan: Plan) -> bool:
    """Whether optimizer states are narrower than 12 bytes a parameter."""
    return plan.execution.optimizer_bytes not in (None, 12)


def narrow_flags(plan: Plan) -> Flags:
    """States of the optimizer in less than 12 bytes."""
    execution = plan.execution
    if not keeps_narrow(plan) or execution.optimizer_bytes is None:
        return ()
    moments = MOMENTS[execution.optimizer_bytes - master_bytes(execution.quantization)]
    return (
        flag("--use-precision-aware-optimizer"),
        flag("--exp-avg-dtype", moments),
        flag("--exp-avg-sq-dtype", moments),
        *when(execution.grad_bytes == 2, flag("--main-grads-dtype", "bf16")),
    )
