"""Flags of megatron-core 0.19 for layers of half a block, Mamba-2 layers and gated delta nets.

Layers of half a block are a hybrid model (`HybridModel`), whose layers, stages, chunks and depths of
multi-token prediction are letters of one pattern; layers of whole blocks with delta nets in turns are a GPT
model with another attention in most of its layers.
"""

from __future__ import annotations

from mist_megatron.frameworks.flags import Flags, flag, when
from mist_megatron.spec.layer import LayerKind
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.megatron_layers import by_block_configs


def is_hybrid(model: ModelSpec) -> bool:
    """Whether Megatron builds it layer by layer of a pattern."""
    return all(kind.half is not None for kind in model.kinds) and not by_block_configs(model)


def letter(kind: LayerKind) -> str:
    """Of a layer in Megatron's patterns (hybrid_layer_allocation.py)."""
    if kind.half == "mlp":
        return "-" if kind.experts is None else "E"
    return "M" if kind.mamba else "G" if kind.delta_net else "+" if kind.latent_attention else "*"


def pattern(plan: Plan) -> str:
    """`MEM*E|MEMEM/*E`: layers, cut where stages and chunks end, chunk c of all stages before chunk c + 1 of
    any; then the layers of each depth."""
    model = plan.model
    letters = "".join(letter(model.kinds[place]) for place in model.kind_of_layer)
    own = [plan.layers_of(stage) for stage in range(len(plan.stages))]
    cuts = [stage[chunk] for chunk in range(plan.vpp) for stage in own]
    main = "|".join(letters[cut.start : cut.stop] for cut in cuts)
    depth = "/" + "".join(letter(kind) for kind in model.mtp_kinds)
    return main + depth * model.mtp_layers


def scan_flags(model: ModelSpec) -> Flags:
    """Sizes of what stands in place of attention, and the gate of what is left of it."""
    mamba = next((kind.mamba for kind in model.kinds if kind.mamba is not None), None)
    net = next((kind.delta_net for kind in model.kinds if kind.delta_net is not None), None)
    flags: Flags = when(any(kind.attention_gate for kind in model.kinds), flag("--attention-output-gate"))
    if mamba is not None:
        flags += (
            flag("--mamba-num-heads", mamba.heads),
            flag("--mamba-head-dim", mamba.head_dim),
            flag("--mamba-state-dim", mamba.state),
            flag("--mamba-num-groups", mamba.groups),
        )
    if net is not None:
        flags += (
            flag("--experimental-attention-variant", "gated_delta_net"),
            flag("--linear-attention-freq", _turns(model)),
            flag("--linear-num-key-heads", net.key_heads),
            flag("--linear-num-value-heads", net.value_heads),
            flag("--linear-key-head-dim", net.key_dim),
            flag("--linear-value-head-dim", net.value_dim),
        )
    return flags


def _turns(model: ModelSpec) -> str:
    """Every n-th layer attends; or a list with 1 for each layer that does not."""
    without = [int(model.kinds[place].delta_net is not None) for place in model.kind_of_layer]
    every = without.index(0) + 1 if 0 in without else len(without) + 1
    if without == [int(layer % every != 0) for layer in range(1, len(without) + 1)]:
        return str(every)
    return str(without).replace(" ", "")


def unwritten_kinds(model: ModelSpec) -> bool:
    """Whether its layers are of half a block or have delta nets in a way that no flag says."""
    kinds = model.kinds
    if by_block_configs(model):
        return any(kind.attention_gate for kind in kinds)
    halves = [kind.half is not None for kind in kinds]
    nets = [kind.delta_net is not None for kind in kinds]
    if any(halves):
        return not all(halves) or any(nets) or model.tied_embeddings
    attending = [kind for kind in kinds if kind.attends]
    gates = {kind.attention_gate for kind in attending}
    return any(kind.mamba is not None for kind in kinds) or len(gates) > 1 or (any(nets) and not attending)
