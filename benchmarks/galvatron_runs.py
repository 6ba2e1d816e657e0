"""How Galvatron-BMW's authors trained, as jobs of ours and their prices.

Tables I, II and V are in 32 bits: 29 samples of BERT-Huge-32 a second are 11 TFLOP/s per RTX TITAN, which has
16.3 in 32 bits and 130.5 in 16. That is told here in 16 bits with everything counted by halves: memory,
bandwidths, and a parameter's 4 + 4 + 8 bytes as 2 + 2 + 4. Dropout is that of the models' published
configurations: 0.1 for BERT and T5, none for ViT and Swin. Layers are transformers' under PyTorch 1.10 or
older, whose softmax keeps its input too: so Table I's ViT and T5-Large are told to a ten-thousandth, and
without it nothing is. BERT's layers have 1 MiB more, as much as a mask of 512 x 512 in 32 bits, Swin's half
an activation, as much as two masks of dropout. Shards are gathered by FairScale's FSDP, which the paper adds
to compute (section V): its 30 cells are told 7 % too fast so, and 22 % where gathers run beside compute.
Table VI is taken to be in 16 bits, on 1,024 tokens: Table I's 685 MB a layer of GPT3-15B are those of 1,024
tokens in 32 bits, but 61 such samples a second are 181 TFLOP/s per A100, more than it has in 32 bits.

What its machine of 8 RTX TITAN takes is read from constants of its first public code (package hetu-galvatron
0.0.2), whose slowdown of 1.3 is the paper's. Only how many micro-batches GPipe had is chosen by Table II.
"""

from __future__ import annotations

from dataclasses import replace

from mist_megatron.ask.evaluators import evaluator_for, kept_programs
from mist_megatron.calibrate.profiles import profile_of
from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.formats.files import load_model
from mist_megatron.price.datasheet import PCIE_INTRA_FRACTION, datasheet_profile
from mist_megatron.price.profile_prices import prices_of
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec, Figure, GpuSpec, cluster_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.profile import InterferenceSet, Profile, Quantity
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.torch import MEMORY, TORCH, TRAFFIC

GIB = 2.0**30
TITAN = "rtx-titan-24gb"
FLOPS_32_BITS = {TITAN: 16.3e12, "a100-sxm-40gb": 156e12}
"""Datasheets: CUDA cores of the RTX TITAN; TF32 of the A100's tensor cores, torch's default up to 1.11."""
NETWORK_BYTES_PER_S = {TITAN: 12.5e9, "a100-sxm-40gb": 12.5e9}
"""Section VII-D."""
ALL_REDUCE_BYTES_PER_S = 2.0**20 / 0.21530878e-3
"""Of 8 RTX TITAN in a node, by the ring's formula: milliseconds per MiB in allreduce_bandwidth_8_gpus.json.
One cell of Table II, the 8 samples of BERT-Huge-32 that DP takes 1.25 s for, gave the same within 1 %."""
SLOWDOWN = 1.3
"""Of compute beside a collective and of that beside compute: section V, and overlap_coefficient.json."""
LAYER_S = 35e-3 / 24
"""Forward pass of a layer 1,024 wide, of 512 tokens, per sample: default of cost_model_dist.py."""
PRODUCT_FRACTION = 0.67
"""Of 16.3 TFLOP/s, for large products: with it 8 samples take such a layer 8 times as long."""
GPIPE_MICRO_BATCHES = 4
"""The paper tuned how many by hand and does not say what came out. Of 1, 2, 4 and 8, which divide all
batches, of micro-batches of 4 samples and 8 of them at most, as in its later code, and of what we find
fastest, 4 is nearest to the 28 cells of GPipe in Table II (off by 22 % in the root of the mean square; 31 %
with 2, 46 to 47 % with the two of 8, 64 % with the fastest), and to those without BERT, without T5, without
ViT or without Swin."""


def with_fairscale() -> None:
    """From here on target torch gathers shards as FairScale does."""
    traffic = replace(TRAFFIC, zero3=replace(TRAFFIC.zero3, gather_overlaps=False))
    object.__setattr__(TORCH, "traffic", lambda execution: traffic)


def as_in_32_bits() -> None:
    """From here on target torch keeps everything in 32 bits, counted by halves, as PyTorch 1.10 does."""
    memory = replace(MEMORY, grad_bytes=2, optimizer_bytes=4, by_halves=True, softmax_keeps_input=True)
    object.__setattr__(TORCH, "memory", lambda execution: memory)


def halved(name: str) -> GpuSpec:
    """That GPU in 32 bits, counted by halves."""
    whole, paper = gpu(name), "Galvatron-BMW"
    inside = whole.intra_bytes_per_s
    if whole.intra_link == "PCIe":
        inside = Figure(value=ALL_REDUCE_BYTES_PER_S / PCIE_INTRA_FRACTION, source=paper)

    def half(figure: Figure) -> Figure:
        return Figure(value=0.5 * figure.value, source=figure.source)

    return replace(
        whole,
        bf16_flops_per_s=None,
        # Four elements of 32 bits are a whole load of tensor cores, and CUDA cores ask for none.
        vector_flops_per_s=Figure(value=FLOPS_32_BITS[name], source="datasheet, 32 bits"),
        fp16_flops_per_s=Figure(value=FLOPS_32_BITS[name], source="datasheet, 32 bits"),
        memory_bytes=half(whole.memory_bytes),
        memory_bytes_per_s=half(whole.memory_bytes_per_s),
        intra_bytes_per_s=half(inside),
        pcie_bytes_per_s=half(whole.pcie_bytes_per_s),
        inter_bytes_per_s=Figure(value=0.5 * NETWORK_BYTES_PER_S[name], source=paper),
    )


def titan_profile() -> Profile:
    """What its products and neighbours cost in 32 bits. What a product takes beyond its arithmetic does not
    grow where that is slower: so the curves of tensor cores reach their half by so much sooner."""
    profile = datasheet_profile(halved(TITAN))
    kernels, slower = profile.kernels, FLOPS_32_BITS[TITAN] / gpu(TITAN).fp16_flops_per_s.value

    def read(quantity: Quantity, value: float) -> Quantity:
        return replace(quantity, value=value)

    def beside(alike: InterferenceSet) -> InterferenceSet:
        slowdown = 1.0 + (SLOWDOWN - 1.0) * (len(alike.streams) - 1)
        return replace(alike, factors=(slowdown,) * len(alike.streams))

    return replace(
        profile,
        kernels=replace(
            kernels,
            gemm_peak_fraction=read(kernels.gemm_peak_fraction, PRODUCT_FRACTION),
            gemm_half_area=read(kernels.gemm_half_area, slower * kernels.gemm_half_area.value),
            gemm_half_depth=read(kernels.gemm_half_depth, slower * kernels.gemm_half_depth.value),
        ),
        interference=tuple(beside(alike) for alike in profile.interference),
    )


def measured_in_halves(profile: Profile) -> Profile:
    """What was measured of collectives, with bytes counted by halves."""
    halves = (
        replace(
            curve,
            bytes_per_s=0.5 * curve.bytes_per_s,
            steps=curve.steps and tuple((0.5 * size, longer) for size, longer in curve.steps),
        )
        for curve in profile.collectives or ()
    )
    return replace(profile, collectives=tuple(halves))


def priced(job: Job) -> StageEvaluator:
    """The evaluator of a job; GPUs that are `halved` compute in 32 bits."""
    if job.cluster.gpu.name not in FLOPS_32_BITS:
        return evaluator_for(job)[0]
    measured = profile_of(job.cluster)
    profile = titan_profile() if measured is None else measured_in_halves(measured)
    return make_evaluator(job, prices_of(profile, job.cluster, job.training.precision), cache=kept_programs())


def cluster(name: str, gpus: int, gib: float | None) -> ClusterSpec:
    """With a budget per GPU."""
    limit = None if gib is None else 0.5 * gib * GIB
    return replace(cluster_of(halved(name), gpus), memory_limit_bytes=limit)


def evaluator_of(model: str, on: ClusterSpec, batch: int, seq_len: int = 512) -> StageEvaluator:
    """Of a job there, attention unfused."""
    spec = load_model(model)
    training = TrainingSpec(
        global_batch=batch, seq_len=spec.tokens or seq_len, precision="fp16", flash_attention=False,
        dropout=0.1 if model.startswith(("bert", "t5")) else 0.0,
    )  # fmt: skip
    return priced(Job(model=spec, training=training, cluster=on, target="torch"))
