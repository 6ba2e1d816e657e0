"""The GPU catalogue: datasheet figures in bytes and seconds, each with its source, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.cluster import Figure, GpuSpec
from mist_megatron.spec.datasheets import SHEETS, Datasheet

MIB = float(1 << 20)
_PCIE = "PCI-SIG: 16 lanes at {} GT/s, 128b/130b"
_PCIE_BYTES_PER_S = {3: (15.75e9, 8), 4: (31.5e9, 16), 5: (63.0e9, 32)}
_SUPERCHIPS = ("gb200-186gb", "gb300-288gb")
_CHIP_TO_CHIP = (225e9, "NVLink-C2C of GB200 and GB300: 900 GB/s both ways between a Grace and two GPUs")


def _gpu(name: str, sheet: Datasheet) -> GpuSpec:
    def figure(value: float, source: str | None = None) -> Figure:
        return Figure(value=value, source=source or sheet.source)

    def tflops(value: float | None, source: str | None = None) -> Figure | None:
        return None if value is None else figure(value * 1e12, source)

    pcie_rate, transfers = _PCIE_BYTES_PER_S[sheet.pcie]
    host_rate, host_link = _CHIP_TO_CHIP if name in _SUPERCHIPS else (pcie_rate, _PCIE.format(transfers))
    return GpuSpec(
        name=name,
        bf16_flops_per_s=tflops(sheet.bf16),
        fp16_flops_per_s=figure(sheet.fp16 * 1e12),
        fp8_flops_per_s=tflops(sheet.fp8),
        vector_flops_per_s=tflops(sheet.vector, sheet.vector_source),
        one_tile_units=sheet.one_tile_units,
        largest_product_flops_per_s=tflops(sheet.largest_product, sheet.largest_source),
        memory_bytes=figure(sheet.memory_mib * MIB, sheet.memory_source),
        memory_bytes_per_s=figure(sheet.memory_gb_per_s * 1e9),
        intra_link=sheet.link,
        intra_bytes_per_s=figure(sheet.link_gb_per_s * 1e9),
        pcie_generation=sheet.pcie,
        pcie_bytes_per_s=figure(host_rate, host_link),
        usual_network=sheet.network,
        inter_bytes_per_s=figure(sheet.network_gb_per_s * 1e9, sheet.network),
        usual_gpus_per_node=sheet.per_node,
        linked_gpus=sheet.linked,
        host_bytes=None if sheet.host_gib is None else figure(sheet.host_gib * 1024 * MIB, sheet.host_source),
    )


CATALOGUE: Mapping[str, GpuSpec] = MappingProxyType({n: _gpu(n, sheet) for n, sheet in SHEETS.items()})

BLACKWELL = frozenset(n for n in CATALOGUE if n.startswith(("b200", "b300", "gb200", "gb300", "rtx5090")))
"""Of compute capability 10 and above, for which Megatron needs no order of launches in one queue."""

DEFAULT_GPU = "a100-sxm-80gb"


def gpu_names() -> tuple[str, ...]:
    return tuple(CATALOGUE)


def gpu(name: str) -> GpuSpec:
    """A GPU by name as people and drivers write it, in letters of any case; what several are called is asked
    for the rest, and a typing error is answered with the nearest name."""
    plain = name.strip().lower()
    if plain in CATALOGUE:
        return CATALOGUE[plain]
    words = words_of(plain)
    several = tuple(known for known in gpu_names() if words and words <= set(known.split("-")))
    if len(several) > 1:
        raise InputError(f"--gpu: {name} may be {check.either(several)}")
    if not several:
        see = "mist-megatron gpus lists them; a file of five figures is one too (docs/tutorials/own_gpu.md)"
        check.known("--gpu", "GPU", name, gpu_names(), closeness=0.75, see=see)
    return CATALOGUE[several[0]]


NOISE = re.compile(r"^(nvidia|amd|tesla|geforce|instinct|gpu|tensor|core|graphics|hbm2e?|hbm3e|)$")
"""Words of names that tell no two GPUs apart."""


def words_of(name: str) -> set[str]:
    """What the catalogue's names are made of: `NVIDIA A100-SXM4-80GB` has a100, sxm and 80gb. Of the H100 the
    one on a card has other memory than HBM3, and drivers do not say SXM."""
    text = re.sub(r"\brtx[\s_-]+(?=\d)", "rtx", re.sub(r"\brtx[\s_-]+(?=a\d)", "", name))
    text = re.sub(r"(\d)[\s_-]+(gi?b)\b", r"\1gb", text)
    words = {re.sub(r"^sxm\d$", "sxm", word) for word in re.split(r"[\s_/-]+", text)}
    if "hbm3" in words:
        words = words - {"hbm3"} | ({"sxm"} if "h100" in words else set())
    # "A100-80" has two numbers, of which the second is its memory: no GPU is called by two or three digits.
    return {re.sub(r"^(\d+)gi?b?$|^(\d{2,3})$", r"\1\2gb", word) for word in words if not NOISE.match(word)}
