"""What products of several experts and the exchange of their tokens take, from curves of a profile."""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import numpy as np

from mist_megatron.price.prices import AllToAll, Array, GroupedGemm, any_of, products_s

SHARPNESS = 4.0
"""Exponent of the smooth maximum of arithmetic and memory traffic of one expert's product."""
STREAMS = 4.0
"""On which Transformer Engine runs experts' products in turn (util/multi_stream.h; assumed, that was not
at hand): tiles that do not fill the device cost each product that much less than a product alone."""
EXCHANGE_FRACTION = 0.60
"""Of the datasheet rate of NVLink, for an all-to-all of NCCL inside a domain: SimuMax's fit on 8 B200; 0.55
and 0.62 follow from the 930 and 827 us of dispatch and combine over 64 GB200 (arXiv:2603.07685)."""
ONCE_FRACTION = 0.70
"""The same where each rank gets one copy: 0.72 and 0.65 follow from HybridEP's 675 and 744 us there, and
DeepEP's authors report 643 to 740 GB/s of 900 on 8 B200."""
OUTSIDE_FRACTION = 0.78
"""Of the rate of a rank's adapter between nodes, for NCCL: of Qwen3-30B on two nodes of H100 a layer's four
journeys by NCCL take 5.4 ms more than by HybridEP (Megatron-Bridge, skill expert-parallel-overlap)."""
ONCE_OUTSIDE_FRACTION = 0.90
"""The same where each node gets one copy, assumed: DeepEP's authors report 43 to 58 GB/s of 50 on H800, bytes
that stay inside a node counted with them."""


class Curve(NamedTuple):
    """What products of a device reach."""

    flops_per_s: float
    half_area: float
    half_depth: float
    bytes_per_s: float
    launch_s: float


def grouped_s(work: GroupedGemm, curve: Curve) -> Array:
    """Each expert's product for itself, by the curve of any product: the depth of a weight's gradient are the
    expert's rows. On SimuMax's 108 grouped products of B200 and 12 of A100 (gemm_attention_efficiency.csv),
    of which the curve has seen none, it is 11 and 4 % off in the mean; with neither depth nor area 18, 7."""
    rows, n, k = work.rows, work.n, work.k
    operand = 1.0 if work.eight_bit else 2.0
    if work.weight_grad:
        area, depth = np.asarray(n * k), np.asarray(rows)
        moved = operand * rows * (n + k) + 2.0 * work.sum_bytes * n * k
    else:
        area, depth = np.asarray(rows * n), np.asarray(k)
        moved = operand * (rows * k + n * k) + 2.0 * rows * n
    busy_s = products_s(area, depth, curve.flops_per_s, curve.half_area / STREAMS, curve.half_depth)
    moved_s = moved / curve.bytes_per_s
    longest = np.maximum(np.maximum(busy_s, moved_s), 1e-15)
    blend = (busy_s / longest) ** SHARPNESS + (moved_s / longest) ** SHARPNESS
    return np.asarray(work.experts * (curve.launch_s + longest * blend ** (1.0 / SHARPNESS)))


def _missed(work: AllToAll, parts: Array) -> Array:
    """Chance that none of a token's experts is in one of so many equal parts of them. Where a token's experts
    come from a few groups, a part has whole groups or lies in one of them; experts of the groups that a token
    has are as likely as each other."""
    kept = round(float(np.max(work.group_top_k)))
    if np.max(work.groups) <= 1.0:
        return _none_of(work.experts, work.experts / parts, work.top_k)
    each = work.experts / work.groups
    own, whole = np.minimum(work.experts / parts, each), np.maximum(work.groups / parts, 1.0)
    missed: Array = np.zeros(())
    for met in range(kept + 1):
        chance: Array = np.full((), float(comb(kept, met)))
        for place in range(met):
            chance = chance * np.maximum(whole - place, 0.0) / (work.groups - place)
        for place in range(kept - met):
            chance = chance * np.maximum(work.groups - whole - place, 0.0) / (work.groups - met - place)
        missed = missed + chance * _none_of(kept * each, met * own, work.top_k)
    return missed


def _none_of(experts: Array, own: Array, top_k: Array) -> Array:
    """Chance that so many different ones of all experts are none of a rank's own."""
    chance: Array = np.ones(np.broadcast_shapes(np.shape(own), np.shape(top_k)))
    for chosen in range(int(np.max(top_k))):
        left = np.maximum(experts - own - chosen, 0.0) / np.maximum(experts - chosen, 1.0)
        chance = chance * np.where(chosen < top_k, left, 1.0)
    return chance


def exchanged_bytes(work: AllToAll) -> tuple[Array, Array]:
    """What one rank sends to other ranks of its node, and to other nodes. Where a node gets one copy of a
    token, that is passed on inside it."""
    ranks, nodes = (np.asarray(count, dtype=np.float64) for count in (work.ranks, work.nodes))
    per_node = ranks / np.maximum(nodes, 1.0)
    copy = np.asarray(work.copy_bytes, dtype=np.float64)
    each = copy * work.top_k / ranks
    inside, outside = each * (per_node - 1.0), each * (ranks - per_node)
    if any_of(work.once):
        met = copy * (1.0 - _missed(work, ranks))
        node_met = copy * (1.0 - _missed(work, nodes))
        once_outside = node_met * (nodes - 1.0)
        passed_on = np.maximum(met * (ranks - per_node) - once_outside, 0.0)
        inside = np.where(work.once > 0.0, met * (per_node - 1.0) + passed_on, inside)
        outside = np.where(work.once > 0.0, once_outside, outside)
    return np.asarray(inside), np.asarray(outside)


def exchange_s(
    work: AllToAll, *, intra_bytes_per_s: float, inter_bytes_per_s: float, latency_s: Array
) -> Array:
    """Both ways out of a rank at once; each at its own rate."""
    inside, outside = exchanged_bytes(work)
    once = np.asarray(work.once) > 0.0
    inside_s = inside / (np.where(once, ONCE_FRACTION, EXCHANGE_FRACTION) * intra_bytes_per_s)
    across = np.where(once, ONCE_OUTSIDE_FRACTION, OUTSIDE_FRACTION) * inter_bytes_per_s
    outside_s = outside / (across if work.bytes_per_s is None else work.bytes_per_s)
    there = (np.asarray(work.ranks) > 1.0) & (inside + outside > 0.0)
    return np.where(there, latency_s + np.maximum(inside_s, outside_s), 0.0)
