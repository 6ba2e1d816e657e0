"""What Megatron-core keeps for backward without Transformer Engine (`--transformer-impl local`).

Runs on a cluster use Transformer Engine, and `layers.py` says what that keeps. The local layers keep more,
most of it avoidable; here is each difference by name, as bytes of one layer. Held to the byte against real
layers of megatron-core 0.19.2 in tests/framework/test_saved_activations.py.
"""

from __future__ import annotations

from mist_megatron.cost.algebra import Expr, maximum, minimum
from mist_megatron.cost.operators import ZERO
from mist_megatron.cost.shapes import ACTIVATION, FULL, HALF, INNER, KEY, QUERY, SCORES, TOKENS
from mist_megatron.cost.symbols import HEAD_DIM, KV_HEADS, TP, S
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.recompute import PARTIAL, WHOLE, Recompute


def local_differences(model: LayerSpec, *, recompute: Recompute) -> dict[str, Expr]:
    """Bytes beyond the graph of `layers.py` without a fused attention core, by reason."""
    found: dict[str, Expr] = {}
    if model.norm == "rmsnorm":
        # torch's composite RMSNorm keeps input and result in fp32 instead of the half-precision input.
        found["norms_in_fp32"] = model.norms * (2 + 2 - 1) * ACTIVATION
    if model.gated_mlp and model.has_mlp:
        # silu(gate) and a shifted copy of the other half, which a fused kernel computes again.
        found["gated_product_unfused"] = 2 * HALF * TOKENS * INNER
    if not model.attends:
        return found
    if model.rotary:
        # Cosines and sines, made anew for queries and for keys.
        found["rotary_tables"] = 4 * HALF * S * HEAD_DIM
    if recompute in PARTIAL:
        # The checkpoint carries the kind of mask as a tensor of one int.
        found["mask_type"] = FULL
    else:
        # Softmax runs in fp32 and its result is kept, beside the half-precision copy that is multiplied.
        found["softmax_in_fp32"] = 2 * SCORES
    found["qkv_copies"] = _qkv_copies(model, recompute=recompute)
    return found


def _qkv_copies(model: LayerSpec, *, recompute: Recompute) -> Expr:
    """Queries, keys and values are views of one projection until something copies them."""
    grouped = model.kv_heads < model.heads
    kept = HALF * TOKENS * (QUERY + 2 * KEY)
    projection = kept
    if recompute in WHOLE and grouped:
        # Keys and values are repeated for every query head before the product.
        return HALF * TOKENS * 3 * QUERY - kept
    if model.rotary:
        # Rotated queries and keys are new; the values keep the whole projection alive.
        return HALF * TOKENS * (QUERY + KEY) + projection - kept
    if grouped:
        # Queries of several groups cannot be viewed as one run of heads; those of a rank's only group can.
        copies = minimum(maximum(KV_HEADS / TP, 1) - 1, 1)
        return copies * HALF * TOKENS * QUERY + projection - kept
    return ZERO
