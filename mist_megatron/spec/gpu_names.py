"""What people and drivers call a GPU, in the words that the catalogue's names are made of."""

from __future__ import annotations

import re

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
