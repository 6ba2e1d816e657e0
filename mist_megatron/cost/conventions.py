"""How each target keeps its bytes: what is allocated when, beyond what the layer graph itself says.

Sources: Megatron-core 0.19 with Transformer Engine 2.x, read and held against measured peaks; DeepSpeed 0.19;
the Mist artifact (EuroSys 2025), whose own numbers its formulas here reproduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from mist_megatron.price.prices import Array
from mist_megatron.spec.plan import Execution, Target
from mist_megatron.targets.rules import DEEPSPEED as DEEPSPEED_TARGETS

MIB = float(1 << 20)


@dataclass(frozen=True, kw_only=True)
class MemoryConventions:
    """Bytes of one target."""

    grad_bytes: int
    """Per parameter of the gradient buffer."""
    optimizer_bytes: int = 12
    """fp32 master weight and two Adam moments."""
    weight_grad_scratch: bool = False
    """Transformer Engine keeps one unused half-precision weight gradient per distinct weight shape: the real
    one is added to the fp32 buffer inside the GEMM, and autograd is handed this instead."""
    recomputes_first_layers: bool = True
    """Megatron's block method recomputes a stage's first layers; Mist its last, whose recomputation then
    meets all kept activations."""
    edges_follow: bool = True
    """Embedding and head follow the stage's ZeRO level and offload; Mist keeps them at ZeRO 1 on the GPU."""
    norm_statistics_bytes: int | None = None
    vocabulary_multiple: int = 128
    """Rows of the token table are padded to this times the tensor-parallel size (Megatron's
    --make-vocab-size-divisible-by); 1 where nothing is padded."""
    bucket_elements: float = 0.0
    """Elements of a gradient-reduction bucket that exists beside the gradients from ZeRO 1 on."""
    reductions_overlap: bool = False
    """Of which ZeRO 1 and 2 have two then."""
    pipe_buffers: bool = False
    """In a pipeline a stage keeps, per micro-batch in flight, what it received beside the copy that its
    layers are given, and what it sent off; the buffers that it receives in; of the last stage the logits of
    two micro-batches; and during the reduction another bucket."""
    step_scratch_bytes: int = 0
    """Per optimizer-owned parameter, while the step runs (fp32 copy of the gradients)."""
    kept_step_grad_bytes: int = 0
    """Per optimizer-owned parameter that stays on the GPU while others are offloaded: the gradient that it is
    stepped with is then kept for good, instead of made by the step."""
    layer_step_bytes: int = 0
    """Per parameter of the layer that is stepped right before its forward pass: its gradient, laid flat and
    in fp32."""
    framework_bytes: float = 0.0
    """Allocated once: matrix-library workspaces, small buffers."""


MEGATRON = MemoryConventions(
    grad_bytes=4,
    weight_grad_scratch=True,
    # cuBLAS workspace of 32 MiB on sm_90 and newer (8 MiB before) through the caching allocator.
    framework_bytes=32 * MIB,
)

MIST = MemoryConventions(
    grad_bytes=2,
    recomputes_first_layers=False,
    edges_follow=False,
    # Its fused norms keep mean and 1/std in fp32 whatever the norm.
    norm_statistics_bytes=8,
    vocabulary_multiple=1,
)

DEEPSPEED = MemoryConventions(
    grad_bytes=2,
    vocabulary_multiple=1,
    # reduce_bucket_size 5e8 elements is DeepSpeed's default and what the emitted configurations say.
    bucket_elements=5e8,
    # runtime/pipe/engine.py; setup_buckets and reduce_gradients of stage_1_and_2.py.
    pipe_buffers=True,
    # Stages 1 and 2 copy a partition's gradients to fp32 when they step (stage_1_and_2.py).
    step_scratch_bytes=4,
    framework_bytes=32 * MIB,
)


DEEPSPEED_PATCHES = replace(DEEPSPEED, kept_step_grad_bytes=4)
"""The patch optimizer_fraction gives the groups that it keeps on the GPU what DeepSpeed gives its host groups
(stage_1_and_2.py, initialize_optimizer_states; stage3.py, the same)."""

_OF_TARGET: Mapping[Target, MemoryConventions] = MappingProxyType(
    {"mist": MIST, "deepspeed": DEEPSPEED, "deepspeed+patches": DEEPSPEED_PATCHES}
)


def conventions_of(target: Target, execution: Execution) -> MemoryConventions:
    """The conventions of a target; an explicit width of the gradient buffer takes precedence."""
    found = _OF_TARGET.get(target, MEGATRON)
    if execution.grad_bytes is not None:
        found = replace(found, grad_bytes=execution.grad_bytes)
    if target in DEEPSPEED_TARGETS and execution.overlap_grad_reduce:
        found = replace(found, reductions_overlap=True)
    if target == "deepspeed+patches" and execution.decoupled_step:
        found = replace(found, layer_step_bytes=found.grad_bytes + 4)
    return found


def padded_vocabulary(vocab: int, tensor_parallel: Array, conventions: MemoryConventions) -> Array:
    """Rows of the token table over all tensor-parallel ranks."""
    multiple = conventions.vocabulary_multiple * np.asarray(tensor_parallel, dtype=np.float64)
    return np.ceil(vocab / multiple) * multiple


CONTEXT_BYTES = 1.0 * 1024 * MIB
"""Not the allocator's: CUDA context with its kernels (0.4-0.6 GiB on A100 and H100) and NCCL's buffers
(some 0.1 GiB per communicator of a training process)."""
USABLE_FRACTION = 0.94
"""Of what is left, for live tensors: reserved over allocated memory was measured at 1.06 at best in the Mist
artifact's runs (1.06-1.23), and a plan that needs the last 6 % fails by fragmentation."""


def limit_of(memory_bytes: float) -> float:
    """Live bytes that a plan may use on a GPU that reports this much memory."""
    return (memory_bytes - CONTEXT_BYTES) * USABLE_FRACTION
