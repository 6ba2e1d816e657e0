"""Constants of presets against published ones: rotary base and scaling, norm epsilon, tied embeddings."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from mist_megatron.errors import InputError
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.spec.constants import ModelConstants
from mist_megatron.spec.presets import PRESETS

# Preset | model as its publisher calls it | theta and scaling | norm epsilon | tied, from the providers of
# Megatron-Bridge 0.2 and 0.3, NeMo 2.5 and the config.json of the checkpoints.
PUBLISHED = """
llama2-7b | Llama-2-7B | 1e4; none | 1e-5 | no
llama2-13b | Llama-2-13B | 1e4; none | 1e-5 | no
llama2-70b | Llama-2-70B | 1e4; none | 1e-5 | no
llama3-8b | Llama-3-8B | 5e5; NONE (8k) | 1e-5 | no
llama3-70b | Llama-3-70B | 5e5; NONE (8k) | 1e-5 | no
llama3.1-8b | Llama-3.1-8B | 5e5; llama3 factor 8, low 1, high 4, orig 8192 | 1e-5 | no
llama3.1-70b | Llama-3.1-8B | 5e5; llama3 factor 8, low 1, high 4, orig 8192 | 1e-5 | no
llama3-405b | Llama-3.1-405B | 5e5; llama3 factor 8 | 1e-5 | no
llama3.2-1b | Llama-3.2-1B | 5e5; llama3 factor 32 | 1e-5 | YES
llama3.2-3b | Llama-3.2-3B | 5e5; llama3 factor 32 | 1e-5 | YES
mistral-7b | Mistral-7B v0.1 | 1e4 + window 4096 | 1e-5 | no
mistral-7b-v0.3 | Mistral-7B v0.1 | 1e6, no window | 1e-5 | no
mistral-nemo-12b | Mistral-Nemo-12B | 1e6 | 1e-5 | no
mistral-small-24b | Mistral-Small-3-24B | 1e8 | 1e-5 | no
qwen2.5-0.5b | Qwen2.5-0.5B | 1e6 | 1e-6 | YES
qwen2.5-1.5b | Qwen2.5-1.5B | 1e6 | 1e-6 | YES
qwen2.5-3b | Qwen2.5-3B | 1e6 | 1e-6 | YES
qwen2.5-7b | Qwen2.5-7B | 1e6 | 1e-6 | no
qwen2.5-14b | Qwen2.5-14B | 1e6 | 1e-5 | no
qwen2.5-32b | Qwen2.5-32B | 1e6 | 1e-5 | no
qwen2.5-72b | Qwen2.5-72B | 1e6 | 1e-5 | no
qwen3-0.6b | Qwen3-0.6B | 1e6 | 1e-6 | YES
qwen3-1.7b | Qwen3-1.7B | 1e6 | 1e-6 | YES
qwen3-4b | Qwen3-4B | 1e6 | 1e-6 | YES
qwen3-8b | Qwen3-8B | 1e6 | 1e-6 | no
qwen3-14b | Qwen3-14B | 1e6 | 1e-6 | no
qwen3-32b | Qwen3-32B | 1e6 | 1e-6 | no
phi4 | Phi-4 | 2.5e5 | 1e-5 | no
"""
ROWS = {row[0]: row[1:] for row in (line.split(" | ") for line in PUBLISHED.strip().splitlines())}
NOTES = Path(
    os.environ.get(
        "MIST_MODEL_NOTES",
        Path(__file__).resolve().parents[3] / "shared" / "notes" / "model_presets.md",
    )
)


@pytest.mark.parametrize("name", ROWS)
def test_presets_have_the_published_constants(name: str) -> None:
    _, positions, epsilon, tied = ROWS[name]
    model, constants = PRESETS[name], PRESETS[name].constants
    assert constants.rotary_base == float(re.split(r"[ ;,]", positions)[0])
    factor = re.search(r"llama3 factor (\d+)", positions)
    assert constants.rotary_scaling == ("llama3" if factor else "none")
    assert constants.rotary_factor == (float(factor[1]) if factor else 1.0)
    window = re.search(r"\+ window (\d+)", positions)
    assert model.window == (int(window[1]) if window else None)
    assert constants.norm_epsilon == float(epsilon)
    assert model.tied_embeddings == (tied == "YES")
    assert constants.dropout == 0.0


def test_the_table_is_that_of_the_notes() -> None:
    """Each committed cell stands in the row of that model in the collection that it was taken from."""
    if not NOTES.exists():
        pytest.skip("the notes on models are not here")
    lines = NOTES.read_text(encoding="utf-8").splitlines()
    for model, positions, epsilon, tied in ROWS.values():
        (row,) = [line for line in lines if re.match(rf"\| {re.escape(model)}( [/|]|$)", line)]
        cells = [cell.strip() for cell in row.split("|")]
        assert any(positions in cell for cell in cells), (model, positions)
        if "as 14B" not in row:
            assert any(epsilon in cell for cell in cells), (model, epsilon)
        assert tied in cells, (model, tied)


def test_every_gated_public_preset_is_in_the_table() -> None:
    """A new preset of a family whose constants differ between releases needs a row."""
    public = {name for name, spec in PRESETS.items() if spec.family == "llama" and not _of_the_paper(name)}
    dense = {name for name in public if PRESETS[name].experts is None and not PRESETS[name].groups}
    assert dense == set(ROWS)


def test_models_that_see_images_have_the_constants_of_their_texts() -> None:
    """Gemma 3's are of layers without a window (arXiv:2503.19786, section 2: base 1M, and a factor of 8 but
    for 1B)."""
    for name, text in (("qwen2.5-vl-7b", "qwen2.5-7b"), ("llava-1.5-13b", "llama2-13b")):
        assert PRESETS[name].constants == PRESETS[text].constants
    found = {size: PRESETS[f"gemma-3-{size}"].constants for size in ("1b", "4b", "12b", "27b")}
    assert {each.rotary_base for each in found.values()} == {1_000_000}
    assert [each.rotary_factor for each in found.values()] == [1.0, 8.0, 8.0, 8.0]


def _of_the_paper(name: str) -> bool:
    return name.startswith("llama-")


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_gpt2_has_dropout(name: str) -> None:
    """resid_pdrop, attn_pdrop and embd_pdrop are 0.1 in its config.json."""
    assert (PRESETS[name].constants.hidden_dropout, PRESETS[name].constants.attention_dropout) == (0.1, 0.1)


@pytest.mark.parametrize("name", ["gpt-neox-20b", "pythia-6.9b", "pythia-12b"])
def test_neox_rotates_a_quarter_of_a_head(name: str) -> None:
    """rotary_pct 0.25 (Black et al. 2022, section 2.1)."""
    assert PRESETS[name].constants.rotary_share == 0.25


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rotary_base": 0}, "rotary_base is 0"),
        ({"rotary_share": 0.0}, "rotary_share is 0.0"),
        ({"rotary_scaling": "ntk"}, "rotary_scaling"),
        ({"norm_epsilon": -1e-5}, "norm_epsilon is -1e-05"),
        ({"hidden_dropout": 1.0}, "hidden_dropout is 1.0"),
        ({"rotary": 5}, "unknown key constants.rotary"),
    ],
)
def test_wrong_constants_are_named(change: dict, words: str) -> None:
    small = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": 100}
    with pytest.raises(InputError, match=words):
        model_from_mapping({**small, "constants": change}, "model.yaml")


def test_constants_are_read_from_a_mapping() -> None:
    small = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": 100}
    said = {"rotary_base": 500000, "norm_epsilon": 1e-6}
    model = model_from_mapping({**small, "constants": said}, "model.yaml")
    assert model.constants == ModelConstants(**said)
