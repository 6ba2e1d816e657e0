"""Mixers that carry a state from token to token, as megatron-core 0.19 runs them (core/ssm), and the gate of
gated attention.

Both scans work in chunks of the sequence: inside a chunk every token meets those before it by products of
small matrices, one set for each head, and a state goes from chunk to chunk. Their Triton kernels are priced
as what they are made of: products at the rate of batches of small ones, and passes over what they read and
write besides. Context parallelism shares out heads: an all-to-all before the convolution and one behind the
scan.

Mamba-2: kernels and saved tensors of mamba_ssm 2.2.4 (ssd_combined.py, MambaSplitConv1dScanCombinedFn: what
was projected, and the scan's output before the gate; layernorm_gated.py). Gated delta nets: those of
flash-linear-attention 0.6.0 (ops/gated_delta_rule/chunk.py, modules/convolution.py) in gated_delta_net/.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from mist_megatron.cost.algebra import Expr, maximum, minimum, number
from mist_megatron.cost.operators import Operator, SavedTensor, Work
from mist_megatron.cost.shapes import FULL, HALF, QUERY, TOKENS
from mist_megatron.cost.symbols import CP, TP, B
from mist_megatron.cost.works import ONE, all_to_all, gemm_work, memory_work
from mist_megatron.spec.recurrent import CONV_WIDTH, DeltaNet, Mamba

MAMBA_CHUNK = 128
"""Tokens of a chunk of Megatron's MambaMixer ..."""
DELTA_CHUNK = 64
"""... and of the gated delta rule."""

Sizes = tuple[Expr, Expr, Expr, Expr]
"""Rows, columns, depth and number of products."""


def _share(count: int) -> Expr:
    """Of a tensor-parallel rank."""
    return number(count) / TP


def _several(name: str, *sizes: Sizes) -> tuple[Work, ...]:
    """Batches of small products."""
    return tuple(gemm_work(f"{name}{k}", *size) for k, size in enumerate(sizes, 1))


def scan_operators(mixer: Mamba | DeltaNet, statistics_bytes: int) -> tuple[Operator, ...]:
    """From what the first projection gives to what the last one reads, which that one keeps."""
    return _mamba(mixer) if isinstance(mixer, Mamba) else _delta_net(mixer, statistics_bytes)


def group_columns(mamba: Mamba) -> Expr:
    """Keys' or queries' columns of a rank's tokens; groups that several context-parallel ranks need are
    copied."""
    own = _share(mamba.groups)
    return own * mamba.state * maximum(ONE, CP / own)


def projected_columns(mixer: Mamba | DeltaNet) -> Expr:
    """What the scan keeps of the first projection, context parallelism's copies among it."""
    if isinstance(mixer, DeltaNet):
        return _share(mixer.projected)
    return _share(2 * mixer.inner + mixer.heads) + 2 * group_columns(mixer)


def states_elements(mixer: Mamba | DeltaNet) -> Expr:
    """Of the states between chunks, of all heads of a rank."""
    if isinstance(mixer, Mamba):
        return TOKENS / MAMBA_CHUNK * _share(mixer.inner) * mixer.state
    return TOKENS / DELTA_CHUNK * _share(mixer.values) * mixer.key_dim


def scan_transients(mixer: Mamba | DeltaNet) -> tuple[Expr, Expr]:
    """Bytes that live beside saved tensors, forward and backward: convolved columns and states between chunks
    in 32 bits; backward besides the gradients of what was projected, and of states in 16 and 32 bits, when
    what the norm and the last projection kept is gone."""
    inner = mixer.inner if isinstance(mixer, Mamba) else mixer.values
    conv, states = HALF * TOKENS * _share(mixer.convolved), states_elements(mixer)
    made = conv + HALF * TOKENS * _share(mixer.projected)
    gone = 2 * HALF * TOKENS * _share(inner)
    return conv + FULL * states, made + (3 * FULL + HALF) * states - gone


def _copied_apart(elements: Expr) -> Expr:
    """Bytes of turning sequence and batch around, which one sequence alone need not."""
    return 2 * HALF * elements * minimum(B - 1, 1)


def _mamba(mamba: Mamba) -> tuple[Operator, ...]:
    inner, conv = HALF * TOKENS * _share(mamba.inner), HALF * TOKENS * _share(mamba.convolved)
    given = projected_columns(mamba)
    return (
        Operator(
            name="mixer_heads",
            forward=(all_to_all("mixer_heads", given),),
            backward=(all_to_all("mixer_heads_back", given),),
        ),
        Operator(
            name="mixer_conv",
            forward=(
                memory_work("mixer_turn", _copied_apart(TOKENS * given)),
                memory_work("mixer_conv", 2 * conv),
            ),
            # It is run again for the scan's backward pass, which keeps what went into it.
            backward=(
                memory_work("mixer_turn_back", _copied_apart(TOKENS * given)),
                memory_work("mixer_conv_back", 5 * conv, kernels=2),
            ),
            saved=(SavedTensor(key="mixer_projected", size_bytes=HALF * TOKENS * given),),
            parameters=_share(mamba.convolved * (CONV_WIDTH + 1)),
        ),
        Operator(
            name="mixer_scan",
            forward=_mamba_forward(mamba),
            backward=_mamba_backward(mamba),
            saved=(SavedTensor(key="mixer_scanned", size_bytes=inner),),
            parameters=_share(3 * mamba.heads),
        ),
        Operator(
            name="mixer_heads_together",
            forward=(all_to_all("mixer_together", _share(mamba.inner)),),
            backward=(all_to_all("mixer_together_back", _share(mamba.inner)),),
        ),
        Operator(
            name="mixer_norm",
            forward=(
                memory_work("mixer_norm", 2 * inner),
                memory_work("mixer_unturn", _copied_apart(TOKENS * _share(mamba.inner))),
            ),
            backward=(
                memory_work("mixer_norm_back", 3 * inner, kernels=2),
                memory_work("mixer_unturn_back", _copied_apart(TOKENS * _share(mamba.inner))),
            ),
            saved=(
                SavedTensor(key="mixer_gated", size_bytes=inner),
                SavedTensor(key="mixer_norm_statistics", size_bytes=FULL * TOKENS * _share(mamba.groups)),
            ),
            parameters=_share(mamba.inner),
        ),
    )


def _mamba_sizes(mamba: Mamba) -> tuple[Expr, Expr, Expr, Expr, Expr]:
    """Tokens of a chunk, columns of a head and of its state, chunks of all heads and of all groups."""
    chunk, chunks = number(MAMBA_CHUNK), TOKENS / MAMBA_CHUNK
    sizes = number(mamba.head_dim), number(mamba.state)
    return (chunk, *sizes, chunks * _share(mamba.heads), chunks * _share(mamba.groups))


def _mamba_forward(mamba: Mamba) -> tuple[Work, ...]:
    """Steps summed within chunks; states of chunks; states passed on, from 32 bits to 16; queries with keys;
    outputs of what is inside the chunk, where tokens see half of it, and of the state before it; the gate."""
    chunk, wide, deep, heads, groups = _mamba_sizes(mamba)
    steps, inner = TOKENS * _share(mamba.heads), HALF * TOKENS * _share(mamba.inner)
    return (
        memory_work("scan_steps", 10 * steps),
        *_several("scan_states", (wide, deep, chunk, heads)),
        memory_work("scan_passed", 8 * states_elements(mamba)),
        *_several("scan_pairs", (chunk, chunk, deep, groups)),
        *_several("scan_out", (chunk, wide, chunk / 2, heads), (chunk, wide, deep, heads)),
        memory_work("scan_gate", 2 * inner),
    )


def _mamba_backward(mamba: Mamba) -> tuple[Work, ...]:
    """Steps, states and pairs once more; the gate's gradient; gradients of states, handed back from chunk to
    chunk; those of values, keys, queries and pairs; those of the steps."""
    chunk, wide, deep, heads, groups = _mamba_sizes(mamba)
    steps, inner = TOKENS * _share(mamba.heads), HALF * TOKENS * _share(mamba.inner)
    half = chunk / 2
    again = tuple(replace(work, name=f"{work.name}_again") for work in _mamba_forward(mamba)[:4])
    return (
        *again,
        memory_work("scan_gate_back", 6 * inner),
        *_several("scan_states_back", (wide, deep, chunk, heads)),
        memory_work("scan_passed_back", 14 * states_elements(mamba)),
        *_several("scan_values_back", (chunk, wide, half, heads), (chunk, wide, deep, heads)),
        *_several("scan_keys_back", (chunk, deep, wide, heads), (chunk, deep, chunk, groups)),
        *_several("scan_queries_back", (chunk, deep, wide, heads), (chunk, deep, chunk, groups)),
        *_several("scan_pairs_back", (chunk, half, wide, heads), (chunk, half, wide, heads)),
        memory_work("scan_steps_back", 24 * steps, kernels=3),
    )


def _delta_net(net: DeltaNet, statistics_bytes: int) -> tuple[Operator, ...]:
    """Queries and keys are normed, and copied for each value head that they serve."""
    conv, values = HALF * TOKENS * _share(net.convolved), HALF * TOKENS * _share(net.values)
    normed = HALF * TOKENS * _share(2 * net.keys)
    copied = HALF * TOKENS * _share(2 * net.value_heads * net.key_dim)
    numbers = TOKENS * _share(net.value_heads)
    given = projected_columns(net)
    return (
        Operator(
            name="mixer_heads",
            forward=(all_to_all("mixer_heads", given),),
            backward=(all_to_all("mixer_heads_back", given),),
        ),
        Operator(
            name="mixer_conv",
            forward=(memory_work("mixer_conv", 2 * conv),),
            backward=(memory_work("mixer_conv_back", 3 * conv, kernels=2),),
            saved=(SavedTensor(key="mixer_projected", size_bytes=HALF * TOKENS * given),),
            parameters=_share(net.convolved * CONV_WIDTH),
        ),
        Operator(
            name="mixer_prepare",
            forward=(
                memory_work("mixer_l2", 2 * normed),
                memory_work("mixer_split", normed + copied + 4 * values + 16 * numbers, kernels=4),
            ),
            backward=(
                memory_work("mixer_split_back", normed + copied + 4 * values + 24 * numbers, kernels=4),
                memory_work("mixer_l2_back", 3 * normed),
            ),
            saved=(
                SavedTensor(key="mixer_l2", size_bytes=normed + FULL * TOKENS * _share(2 * net.key_heads)),
                SavedTensor(key="mixer_gate", size_bytes=values),
            ),
            parameters=_share(2 * net.value_heads),
        ),
        Operator(
            name="mixer_scan",
            forward=_delta_forward(net),
            backward=_delta_backward(net),
            saved=(
                SavedTensor(key="mixer_scan_inputs", size_bytes=copied + values + 8 * numbers),
                SavedTensor(key="mixer_inverse", size_bytes=HALF * DELTA_CHUNK * numbers),
            ),
        ),
        _delta_norm(net, statistics_bytes),
        Operator(
            name="mixer_heads_together",
            forward=(all_to_all("mixer_together", _share(net.values)),),
            backward=(all_to_all("mixer_together_back", _share(net.values)),),
        ),
    )


def _delta_norm(net: DeltaNet, statistics_bytes: int) -> Operator:
    """Of each value head, then times the gate's SiLU."""
    values = HALF * TOKENS * _share(net.values)
    numbers = TOKENS * _share(net.value_heads)
    return Operator(
        name="mixer_norm",
        forward=(
            memory_work("mixer_norm", 2 * values),
            memory_work("mixer_gated", 5 * values, kernels=2),
        ),
        backward=(
            memory_work("mixer_gated_back", 7 * values, kernels=2),
            memory_work("mixer_norm_back", 3 * values, kernels=2),
        ),
        saved=(
            SavedTensor(key="mixer_scanned", size_bytes=values),
            SavedTensor(key="mixer_norm_output", size_bytes=values),
            SavedTensor(key="mixer_norm_statistics", size_bytes=statistics_bytes * numbers),
        ),
        parameters=number(net.value_dim),
    )


def _delta_sizes(net: DeltaNet) -> tuple[Expr, Expr, Expr, Expr]:
    """Tokens of a chunk, columns of a key and of a value, chunks of all value heads."""
    chunk = number(DELTA_CHUNK)
    return chunk, number(net.key_dim), number(net.value_dim), TOKENS / chunk * _share(net.value_heads)


def _delta_forward(net: DeltaNet) -> tuple[Work, ...]:
    """Keys with keys and the inverse of that triangle (as much again), which makes keys and values anew;
    states, each of the one before, and what it says of the values; outputs from queries."""
    chunk, key, value, many = _delta_sizes(net)
    return (
        memory_work("scan_steps", 8 * TOKENS * _share(net.value_heads)),
        *_several("scan_inverse", (chunk, chunk, key, many), (chunk, chunk, chunk, many)),
        *_several("scan_anew", (chunk, key, chunk, many), (chunk, value, chunk, many)),
        *_several("scan_states", (chunk, value, key, many), (key, value, chunk, many)),
        *_several(
            "scan_out", (chunk, value, key, many), (chunk, chunk, key, many), (chunk, value, chunk, many)
        ),
    )


def _delta_backward(net: DeltaNet) -> tuple[Work, ...]:
    """Keys and values anew and states once more; then the gradients of each of these products."""
    chunk, key, value, many = _delta_sizes(net)
    again = tuple(replace(work, name=f"{work.name}_again") for work in _delta_forward(net)[3:7])
    return (
        *again,
        *_several("scan_values_back", (chunk, value, chunk, many), (chunk, chunk, key, many)),
        *_several(
            "scan_states_back",
            (chunk, value, key, many), (key, value, chunk, many), (key, value, chunk, many),
        ),
        *_several(
            "scan_pairs_back",
            (chunk, chunk, value, many), (chunk, key, value, many), (chunk, key, value, many),
            (chunk, key, value, many), (chunk, key, chunk, many), (chunk, key, chunk, many),
        ),
        *_several(
            "scan_anew_back",
            (chunk, chunk, key, many), (chunk, chunk, value, many), (chunk, key, chunk, many),
            (chunk, value, chunk, many), (chunk, chunk, chunk, many), (chunk, chunk, chunk, many),
            (chunk, key, chunk, many),
        ),
        memory_work("scan_steps_back", 24 * TOKENS * _share(net.value_heads), kernels=3),
    )  # fmt: skip


COMPILED = ("scan_", "expert_activation", "shared_activation", "mixer_norm")
"""How the names of work begin that runs in kernels of Triton or torch.compile beside scans and experts. Dense
activations and residual streams run in such kernels too, but products' rates were fitted to dense runs with
these at memory's rate; fitted anew without, dense runs that took no part came out worse (2026-11-27)."""


def slowed(operators: tuple[Operator, ...], times: Fraction) -> tuple[Operator, ...]:
    """With what a compiler made (`COMPILED`) taking so many times as long."""

    def longer(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(_longer(work, times) if work.name.startswith(COMPILED) else work for work in works)

    if times == 1:
        return operators
    return tuple(
        replace(one, forward=longer(one.forward), backward=longer(one.backward)) for one in operators
    )


def _longer(work: Work, times: Fraction) -> Work:
    if work.gemm is None:
        return replace(work, moved_bytes=times * work.moved_bytes)
    m, n, k, batch = work.gemm
    return replace(work, gemm=(m, n, k, times * batch))


def output_gate() -> Operator:
    """Attention's output times a sigmoid of the gate, which the first projection gave: both are kept."""
    moved = HALF * TOKENS * QUERY
    return Operator(
        name="attention_gate",
        forward=(memory_work("attention_gate", 3 * moved, kernels=2),),
        backward=(memory_work("attention_gate_back", 5 * moved, kernels=3),),
        saved=(
            SavedTensor(key="attention_output", size_bytes=moved),
            SavedTensor(key="attention_gate", size_bytes=moved),
        ),
    )


def is_scan(names: Iterable[str]) -> bool:
    """Whether operators of these names are a layer's with such a mixer."""
    return "mixer_scan" in names
