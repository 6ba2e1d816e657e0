"""The MLP of a layer as a mixture of experts: router, exchange of tokens, grouped products, shared experts.

What Transformer Engine and megatron-core 0.19 compute, send and keep (moe_layer.py, token_dispatcher.py,
experts.py): a rank routes the tokens that it holds after sequence and context parallelism, whatever ranks its
experts lie on; probabilities are multiplied in before the second product, so that outputs of experts are not
kept.
"""

from __future__ import annotations

from dataclasses import replace

from mist_megatron.cost.algebra import Expr, number
from mist_megatron.cost.operators import ZERO, Operator, SavedTensor, Work, WorkKind
from mist_megatron.cost.shapes import (
    ACTIVATION,
    EXPERT_INNER,
    EXPERT_ROWS,
    FULL,
    HALF,
    OWN_EXPERTS,
    ROUTED,
    ROWS,
    SHARED_INNER,
    TOKENS,
    UNEVEN,
)
from mist_megatron.cost.symbols import ETP, EXPERT_WIDTH, EXPERTS, HIDDEN, SP, TOP_K
from mist_megatron.cost.works import collective_work, memory_work, products, summed_gradients
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.kinds import Dispatcher
from mist_megatron.spec.mesh import Group

SCORE_BYTES = 13
"""Kept per token and expert by scoring, top-k and the loss that balances loads: logits, scores and weights in
32 bits, and a mask."""
ROW_MAP_BYTES = 8
"""Of the two maps of rows of the fused permutation, 32 bits each, per token and expert ..."""
ROW_MAP_COUNT_BYTES = 4
"""... and the number of a token's rows."""
SCORE_PASSES = 10
"""Over the scores in 32 bits, forward, unfused ..."""
SCORE_KERNELS = 8
"""... in so many kernels."""


HOST_LAUNCHES = {"permute": (12, 8), "expert_in": (15, 25), "unpermute": (4, 6)}
"""What the host launches besides, forward and backward, of a mixture that no graph replays: counts of tokens
by expert, offsets, weights of tokens, experts one by one. 70 together make Qwen3-30B on 16 H100
(Megatron-Bridge, FP8 by HybridEP without graphs: 29.3 to 29.7 s) as slow as it is; how they are spread over
the operators is assumed."""
ALL_TO_ALL_LAUNCHES = (6, 14)
"""Further ones of NCCL's all-to-all, of which splits are read by the host (assumed)."""


def mixture(
    experts: ExpertSpec,
    *,
    gated: bool,
    bias: bool,
    dispatcher: Dispatcher,
    eight_bit: bool,
    fused: bool = False,
) -> tuple[Operator, ...]:
    """Between the norm and the residual addition, which are those of any layer. `fused`: Transformer Engine's
    fuser makes one kernel of the experts' products, their activation and the casts between them."""
    gates = 2 if gated else 1
    shared = _shared(experts, gates, bias=bias, eight_bit=eight_bit) if experts.shared_ffn_hidden else ()
    routed = _routed(gates, bias=bias, eight_bit=eight_bit, fused=fused and not experts.weighs_input)
    operators = (
        _router(experts),
        *shared,
        *(_latent_in(eight_bit) if experts.latent else ()),
        _permute(dispatcher),
        _exchange("dispatch", experts, dispatcher, forward=True),
        *((_weighed_input(),) if experts.weighs_input else ()),
        *routed,
        _exchange("combine", experts, dispatcher, forward=False),
        _unpermute(dispatcher),
        *(_latent_out(eight_bit) if experts.latent else ()),
    )
    return tuple(_with_launches(operator, dispatcher) for operator in operators)


def _with_launches(operator: Operator, dispatcher: Dispatcher) -> Operator:
    """With what keeps the host busy and the device hardly."""
    there, back = HOST_LAUNCHES.get(operator.name, (0, 0))
    if operator.name == "unpermute" and dispatcher == "alltoall":
        there, back = there + ALL_TO_ALL_LAUNCHES[0], back + ALL_TO_ALL_LAUNCHES[1]
    if not there:
        return operator
    return replace(
        operator,
        forward=(*operator.forward, memory_work(f"{operator.name}_launches", ZERO, kernels=there)),
        backward=(*operator.backward, memory_work(f"{operator.name}_launches_back", ZERO, kernels=back)),
    )


def _router(experts: ExpertSpec) -> Operator:
    forward, backward = products("router", ROWS, (EXPERTS, HIDDEN), eight_bit=False)
    passed = FULL * EXPERTS * ROWS
    readers = 2 + bool(experts.shared_ffn_hidden) + experts.shared_gate
    return Operator(
        name="router",
        forward=(*forward, memory_work("router_scores", SCORE_PASSES * passed, kernels=SCORE_KERNELS)),
        backward=(
            memory_work("router_scores_backward", SCORE_PASSES / number(2) * passed, kernels=4),
            *backward,
            *summed_gradients("normed2", readers, ROWS * HIDDEN),
        ),
        saved=(
            SavedTensor(key="normed2", size_bytes=ACTIVATION),
            SavedTensor(key="router_scores", size_bytes=SCORE_BYTES * EXPERTS * ROWS),
        ),
        parameters=HIDDEN * EXPERTS + (EXPERTS if experts.router_bias else ZERO),
    )


def _without_casts(works: tuple[Work, ...], but: str = "") -> tuple[Work, ...]:
    return tuple(work for work in works if work.kind is not WorkKind.MEMORY or work.name == but)


def _activation(
    name: str, gates: int, inner: Expr, kept: tuple[SavedTensor, ...], *, fused: bool = False
) -> Operator:
    """Fused with the product of a gated one, and with what weighs a token: keeps its input only. Or fused
    with the products on both sides, and no pass of its own."""
    if fused:
        return Operator(name=name, forward=(), backward=(), saved=kept)
    return Operator(
        name=name,
        forward=(memory_work(f"{name}_forward", (gates + 1) * inner),),
        backward=(memory_work(f"{name}_backward", (2 * gates + 1) * inner),),
        saved=kept,
    )


def _shared(experts: ExpertSpec, gates: int, *, bias: bool, eight_bit: bool) -> tuple[Operator, ...]:
    """One tensor-parallel MLP that sees every token; it gathers and scatters rows for itself."""
    whole = HALF * TOKENS * HIDDEN
    into, into_back = products("shared_in", TOKENS, (gates * SHARED_INNER, HIDDEN), eight_bit=eight_bit)
    out, out_back = products("shared_out", TOKENS, (HIDDEN, SHARED_INNER), eight_bit=eight_bit)
    inner = HALF * TOKENS * SHARED_INNER
    operators = (
        Operator(
            name="shared_gather",
            forward=(collective_work("shared_gather", WorkKind.ALL_GATHER, SP * whole),),
            backward=(
                collective_work("shared_gather_again", WorkKind.ALL_GATHER, SP * whole),
                collective_work("shared_gather_scatter", WorkKind.REDUCE_SCATTER, SP * whole),
                collective_work("shared_gather_reduce", WorkKind.ALL_REDUCE, (1 - SP) * whole),
            ),
        ),
        Operator(
            name="shared_in",
            forward=into,
            backward=into_back,
            saved=(SavedTensor(key="normed2", size_bytes=ACTIVATION, for_weight=True),),
            parameters=gates * SHARED_INNER * HIDDEN + (gates * SHARED_INNER if bias else ZERO),
        ),
        _activation(
            "shared_activation", gates, inner, (SavedTensor(key="shared_hidden", size_bytes=gates * inner),)
        ),
        Operator(
            name="shared_out",
            forward=out,
            backward=out_back,
            saved=(SavedTensor(key="shared_activated", size_bytes=inner, for_weight=True),),
            parameters=HIDDEN * SHARED_INNER + (HIDDEN if bias else ZERO),
        ),
        Operator(
            name="shared_reduce",
            forward=(
                collective_work("shared_scatter", WorkKind.REDUCE_SCATTER, SP * whole),
                collective_work("shared_reduce", WorkKind.ALL_REDUCE, (1 - SP) * whole),
                memory_work("shared_add", 3 * ACTIVATION),
            ),
            backward=(collective_work("shared_back", WorkKind.ALL_GATHER, SP * whole),),
        ),
    )
    return (*operators, _shared_gate()) if experts.shared_gate else operators


def _shared_gate() -> Operator:
    """A column of its own, a sigmoid, and a product with the shared experts' output, which is kept for it."""
    forward, backward = products("shared_gate", ROWS, (number(1), HIDDEN), eight_bit=False)
    return Operator(
        name="shared_gate",
        forward=(*forward, memory_work("shared_gate_forward", 2 * ACTIVATION, kernels=2)),
        backward=(memory_work("shared_gate_backward", 3 * ACTIVATION, kernels=3), *backward),
        saved=(
            SavedTensor(key="normed2", size_bytes=ACTIVATION),
            SavedTensor(key="shared_output", size_bytes=ACTIVATION),
            SavedTensor(key="shared_gate", size_bytes=HALF * ROWS),
        ),
        parameters=HIDDEN,
    )


def _latent_in(eight_bit: bool) -> tuple[Operator, ...]:
    """From the hidden width to that of the experts; every tensor-parallel rank has all of it."""
    forward, backward = products("latent_in", ROWS, (EXPERT_WIDTH, HIDDEN), eight_bit=eight_bit)
    return (
        Operator(
            name="latent_in",
            forward=forward,
            backward=backward,
            saved=(SavedTensor(key="normed2", size_bytes=ACTIVATION, for_weight=True),),
            parameters=EXPERT_WIDTH * HIDDEN,
        ),
    )


def _latent_out(eight_bit: bool) -> tuple[Operator, ...]:
    forward, backward = products("latent_out", ROWS, (HIDDEN, EXPERT_WIDTH), eight_bit=eight_bit)
    return (
        Operator(
            name="latent_out",
            forward=forward,
            backward=backward,
            saved=(SavedTensor(key="latent_output", size_bytes=HALF * ROWS * EXPERT_WIDTH, for_weight=True),),
            parameters=EXPERT_WIDTH * HIDDEN,
        ),
    )


GATHERED = number(4, 3)
"""Times as long as a plain pass over as many bytes: rows in another order come at 0.50 and 0.51 of B200's
memory rate, where plain passes come at 0.67 (SimuMax's measured bandwidths)."""


def _rows_moved(dispatcher: Dispatcher) -> Expr:
    """Bytes read and written where tokens are copied for each of their experts, or added up again, and where
    what has come is sorted by expert; `flex` sends tokens as they are, and copies where they have come."""
    one, all_rows = HALF * ROWS * EXPERT_WIDTH, HALF * ROUTED * EXPERT_WIDTH
    sorted_rows = 2 * ETP * all_rows
    return GATHERED * (sorted_rows if dispatcher == "flex" else one + all_rows + sorted_rows)


def _permute(dispatcher: Dispatcher) -> Operator:
    moved = _rows_moved(dispatcher)
    return Operator(
        name="permute",
        forward=(memory_work("permute_forward", moved, kernels=3),),
        backward=(memory_work("permute_backward", moved, kernels=3),),
        saved=(
            SavedTensor(key="row_map", size_bytes=(ROW_MAP_BYTES * EXPERTS + ROW_MAP_COUNT_BYTES) * ROWS),
        ),
    )


def _unpermute(dispatcher: Dispatcher) -> Operator:
    moved = _rows_moved(dispatcher)
    return Operator(
        name="unpermute",
        forward=(memory_work("unpermute_forward", moved, kernels=2),),
        backward=(memory_work("unpermute_backward", moved, kernels=2),),
    )


def _exchange(name: str, experts: ExpertSpec, dispatcher: Dispatcher, *, forward: bool) -> Operator:
    """Tokens to the ranks of their experts, or their outputs back; gradients go the other way. In 0.19 every
    dispatcher sends 16 bits. `allgather` gives every rank all tokens of the group."""
    first, then = (WorkKind.ALL_GATHER, WorkKind.REDUCE_SCATTER)[:: 1 if forward else -1]
    if dispatcher == "allgather":
        message = HALF * EXPERT_WIDTH * ROWS
        return Operator(
            name=name,
            forward=(collective_work(name, first, message * _GROUP_SIZE, Group.EXPERT_ALL),),
            backward=(collective_work(f"{name}_back", then, message * _GROUP_SIZE, Group.EXPERT_ALL),),
        )
    once = number(int(dispatcher == "flex"))
    copy = HALF * EXPERT_WIDTH * ROWS * UNEVEN

    def sent(named: str) -> Work:
        return Work(
            name=named,
            kind=WorkKind.ALL_TO_ALL,
            moved_bytes=copy * TOP_K,
            exchange=(copy, TOP_K, EXPERTS, once, number(experts.groups), number(experts.group_top_k)),
            group=Group.EXPERT,
        )

    parts = HALF * EXPERT_WIDTH * EXPERT_ROWS
    there = (sent(name), collective_work(f"{name}_parts", first, parts, Group.EXPERT_TENSOR))
    back = (collective_work(f"{name}_parts_back", then, parts, Group.EXPERT_TENSOR), sent(f"{name}_back"))
    if not forward:
        # Outputs of an expert's parts are summed before they go back.
        there, back = (there[1], there[0]), (back[1], back[0])
    return Operator(name=name, forward=there, backward=back)


_GROUP_SIZE = OWN_EXPERTS**-1 * EXPERTS * ETP
"""Ranks among which the tokens of an expert-parallel group lie, parts of experts included."""


def _routed(gates: int, *, bias: bool, eight_bit: bool, fused: bool) -> tuple[Operator, ...]:
    rows = EXPERT_ROWS / OWN_EXPERTS
    into, into_back = products(
        "expert_in", rows, (gates * EXPERT_INNER, EXPERT_WIDTH), OWN_EXPERTS, eight_bit=eight_bit
    )
    out, out_back = products(
        "expert_out", rows, (EXPERT_WIDTH, EXPERT_INNER), OWN_EXPERTS, eight_bit=eight_bit
    )
    if fused:
        # Rows come in 8 bits, and the gradient leaves in 16; what lies between is never cast by itself.
        out, out_back = _without_casts(out), _without_casts(out_back, but="expert_out_gradient_cast")
        into_back = _without_casts(into_back)
    inner = HALF * EXPERT_ROWS * EXPERT_INNER
    first = OWN_EXPERTS * gates * EXPERT_INNER * (EXPERT_WIDTH + (1 if bias else 0))
    second = OWN_EXPERTS * EXPERT_WIDTH * (EXPERT_INNER + (1 if bias else 0))
    return (
        Operator(
            name="expert_in",
            forward=into,
            backward=into_back,
            saved=(
                SavedTensor(
                    key="expert_input", size_bytes=HALF * EXPERT_ROWS * EXPERT_WIDTH, for_weight=True
                ),
            ),
            parameters=first,
            expert_parameters=first,
        ),
        _activation(
            "expert_activation",
            gates,
            inner,
            (
                SavedTensor(key="expert_hidden", size_bytes=gates * inner),
                # Probabilities, and where they came from, in 32 bits.
                SavedTensor(key="expert_weights", size_bytes=2 * FULL * EXPERT_ROWS),
            ),
            fused=fused,
        ),
        Operator(
            name="expert_out",
            forward=out,
            backward=out_back,
            saved=(SavedTensor(key="expert_activated", size_bytes=inner, for_weight=True),),
            parameters=second,
            expert_parameters=second,
        ),
        *((_output_bias(),) if bias else ()),
    )


def with_clamp(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """With what GPT-OSS's activation reads clamped, in operators of their own that no fusion has
    (fused_bias_geglu.py, weighted_bias_quick_geglu_impl): forward both halves are read and written, once more
    together, and a number goes to the device; backward two masks are made and applied, and gradients put
    together. Counted on megatron-core 0.19.2, in bytes of one half. What was there before is kept beside what
    is clamped."""
    inner = HALF * EXPERT_ROWS * EXPERT_INNER
    clamp = Operator(
        name="expert_activation_clamp",
        forward=(memory_work("expert_clamp_forward", 8 * inner, kernels=4),),
        backward=(memory_work("expert_clamp_backward", 15 * inner, kernels=7),),
        saved=(SavedTensor(key="expert_clamped", size_bytes=2 * inner),),
    )
    at = [operator.name for operator in operators].index("expert_activation")
    return (*operators[:at], clamp, *operators[at:])


def _weighed_input() -> Operator:
    """Rows times their weights in 32 bits, rounded to 16 (experts.py, moe_apply_probs_on_input): forward they
    are read, written wide, read and written; backward the gradient is widened, multiplied for the rows and
    rounded, and multiplied and summed for the weights. Rows as they came are kept."""
    elements = EXPERT_ROWS * EXPERT_WIDTH
    return Operator(
        name="weighed_input",
        forward=(memory_work("weighed_input", 12 * elements, kernels=2),),
        backward=(memory_work("weighed_input_backward", 34 * elements, kernels=5),),
        saved=(SavedTensor(key="expert_unweighed", size_bytes=HALF * elements),),
    )


def _output_bias() -> Operator:
    """Biases of the second products, weighed by the probabilities of tokens in 32 bits (experts.py,
    _apply_bias): forward it is multiplied (4 bytes an element written), added (6 read, 4 written), put
    together (8) and rounded (6); backward that is undone, and summed once for biases and once for weights."""
    elements = EXPERT_ROWS * EXPERT_WIDTH
    return Operator(
        name="expert_bias",
        forward=(memory_work("expert_bias_forward", 28 * elements, kernels=4),),
        backward=(memory_work("expert_bias_backward", 44 * elements, kernels=8),),
    )
