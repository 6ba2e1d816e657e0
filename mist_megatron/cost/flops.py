"""FLOPs of an iteration, and of a GPU at its peak."""

from __future__ import annotations

from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.layer import LayerKind, LayerSpec
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.training import TrainingSpec


def model_flops(model: ModelSpec, training: TrainingSpec, *, causal: bool = False) -> float:
    """FLOPs of one optimizer step without recomputation: 6 per weight of a matrix and token, and
    12 layers * query width * sequence per token for full attention (Chowdhery et al. 2022, appendix B), which
    causal attention counts as well, or half of it where `causal` asks for what its mask leaves; windows have
    their share of that. Of experts those count that a token goes to."""
    if not model.plain:
        return training.global_batch * _sample_flops(model, float(training.seq_len), causal=causal)
    matrices, attended = float(model.hidden * model.vocab), 0.0
    mixed = any(
        kind.experts is not None or kind.latent_attention is not None or kind.half or not kind.attends
        for kind in model.kinds
    )
    if mixed:
        matrices = _met_elements(model)
    depths = model.mtp_layers if mixed else 0
    in_depth = [kind.name for kind in model.mtp_kinds]
    for kind in model.kinds:
        layers = model.layers_of_kind[kind.name]
        matrices += 0 if mixed else layers * kind.matrix_elements
        seen = training.seq_len if kind.window is None else min(kind.window, training.seq_len)
        share = kind.pairs_share(training.seq_len) if kind.attention == "causal" else seen / training.seq_len
        share = 0.5 * share if causal and kind.attention == "causal" else share
        layers += depths * in_depth.count(kind.name)
        if kind.attends:
            attended += 12.0 * layers * _core_width(kind) * training.seq_len * share
        mixer = kind.mamba or kind.delta_net
        attended += 0.0 if mixer is None else 3.0 * layers * mixer.scan_flops()
    per_token = 6.0 * matrices + attended
    return per_token * training.global_batch * training.seq_len


def _met_elements(model: ModelSpec) -> float:
    """Weights that a token of a model with experts or latents meets, norms and biases with them, the table
    that is looked up without; each depth of multi-token prediction is a layer and an output layer more."""
    table = model.hidden * model.vocab
    met = model.active_parameters - model.embedding_parameters + (table if model.tied_embeddings else 0)
    each = sum(kind.active_block_parameters for kind in model.mtp_kinds)
    return float(met + model.mtp_layers * (each + 2 * model.hidden**2 + table))


def _core_width(kind: LayerSpec) -> float:
    """Columns of all heads; the mean of those of scores and of values, where these differ."""
    latent = kind.latent_attention
    return kind.query_width if latent is None else kind.heads * (latent.qk_head_dim + latent.v_head_dim) / 2


def peak_flops_per_s(cluster: ClusterSpec, training: TrainingSpec) -> float:
    """Dense peak of one GPU in the precision that is trained in."""
    gpu = cluster.gpu
    if training.precision == "fp8" and gpu.fp8_flops_per_s:
        return gpu.fp8_flops_per_s.value
    if training.precision == "bf16" and gpu.bf16_flops_per_s:
        return gpu.bf16_flops_per_s.value
    return gpu.fp16_flops_per_s.value


def _sample_flops(model: ModelSpec, seq_len: float, *, causal: bool) -> float:
    """Forward and backward, nothing recomputed: 2 per weight and token forward, 2 for the gradient of the
    input and 2 for that of the weight, where there is a backward pass and where the weight is trained;
    attention as `model_flops` counts it."""
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
    flops = kind.matrix_elements * own
    if kind.cross_attention is not None:
        flops += 2.0 * kind.hidden * kind.query_width * own
        flops += 2.0 * kind.cross_attention.hidden * kind.kv_width * outside
    return flops


def _pairs(kind: LayerKind, seq_len: float, *, causal: bool) -> float:
    """Pairs of tokens that attention meets; of a causal mask all, or half where `causal` says so."""
    if kind.entry is not None:
        return 0.0
    own = kind.sequence(seq_len)
    across = 0.0 if kind.cross_attention is None else own * kind.outside(seq_len)
    if kind.attention == "full":
        return across + own * (own if kind.window is None else min(float(kind.window), own))
    return across + own * own * kind.pairs_share(own) * (0.5 if causal else 1.0)
