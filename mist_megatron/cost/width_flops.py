"""FLOPs of models whose layers differ in width, tokens or training, a sample at a time."""

from __future__ import annotations

from mist_megatron.spec.layer import LayerKind
from mist_megatron.spec.model import ModelSpec


def sample_flops(model: ModelSpec, seq_len: float, *, causal: bool) -> float:
    """Forward and backward, nothing recomputed: 2 per weight and token forward, 2 for the gradient of the
    input and 2 for that of the weight, where there is a backward pass and where the weight is trained;
    attention as `predict.model_flops` counts it."""
    total = 0.0
    for kind in model.kinds:
        back = model.passes_back(kind)
        met = _matrices(kind, seq_len) * (2.0 + 2.0 * back + 2.0 * (not kind.still))
        met += 6.0 * kind.adapter_parameters * kind.sequence(seq_len)
        attended = _pairs(kind, seq_len, causal=causal) * kind.query_width * (12.0 if back else 4.0)
        total += model.layers_of_kind[kind.name] * (met + attended)
    first, head = model.first_shape, model.head_shape
    patches = model.patch_elements * first.hidden * first.sequence(seq_len)
    rows = head.hidden * (model.vocab + head.hidden * model.head_transform)
    total += patches * (2.0 if first.still else 4.0)
    return total + rows * head.sequence(seq_len) * (4.0 if head.still else 6.0)


def _matrices(kind: LayerKind, seq_len: float) -> float:
    """Weights that tokens of a sample are multiplied by, summed over these."""
    own, outside = kind.sequence(seq_len), kind.outside(seq_len)
    if kind.entry is not None:
        return kind.matrix_elements * outside / kind.entry.merged
    found = kind.matrix_elements * own
    if kind.cross_attention is not None:
        found += 2.0 * kind.hidden * kind.query_width * own
        found += 2.0 * kind.cross_attention.hidden * kind.kv_width * outside
    return found


def _pairs(kind: LayerKind, seq_len: float, *, causal: bool) -> float:
    """Pairs of tokens that attention meets; of a causal mask all, or half where `causal` says so."""
    if kind.entry is not None:
        return 0.0
    own = kind.sequence(seq_len)
    across = 0.0 if kind.cross_attention is None else own * kind.outside(seq_len)
    if kind.attention == "full":
        return across + own * (own if kind.window is None else min(float(kind.window), own))
    return across + own * own * kind.pairs_share(own) * (0.5 if causal else 1.0)
