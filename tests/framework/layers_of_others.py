"""Layers of transformers, and their configurations: to import them takes longer than to collect tests."""

from transformers import (
    BertConfig,
    CLIPVisionConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    SwinConfig,
    T5Config,
    ViTConfig,
)
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RotaryEmbedding
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLPatchMerger,
    Qwen2_5_VLVisionBlock,
)
from transformers.models.swin.modeling_swin import SwinLayer, SwinPatchMerging
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.vit.modeling_vit import ViTLayer

__all__ = [
    "BertConfig",
    "BertLayer",
    "CLIPEncoderLayer",
    "CLIPVisionConfig",
    "GPT2Block",
    "GPT2Config",
    "Gemma2Config",
    "Gemma2DecoderLayer",
    "Gemma2RotaryEmbedding",
    "Gemma3DecoderLayer",
    "Gemma3RotaryEmbedding",
    "Gemma3TextConfig",
    "LlamaConfig",
    "LlamaDecoderLayer",
    "LlamaRotaryEmbedding",
    "Qwen2_5_VLPatchMerger",
    "Qwen2_5_VLVisionBlock",
    "Qwen2_5_VLVisionConfig",
    "SwinConfig",
    "SwinLayer",
    "SwinPatchMerging",
    "T5Block",
    "T5Config",
    "ViTConfig",
    "ViTLayer",
]
