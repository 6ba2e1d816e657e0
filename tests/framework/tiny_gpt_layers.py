"""A GPT of four small layers in plain torch, whole and as the list that DeepSpeed's pipeline takes."""

from __future__ import annotations

from typing import Any

LAYERS, WIDTH, HEADS, VOCAB, SEQ = 4, 32, 4, 64, 16


def block_class() -> Any:
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            # Without bias: that of the keys has no gradient but rounding, which Adam would blow up.
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            b, s, h = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(a.transpose(1, 2).reshape(b, s, h))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    return Block


def tiny_pipeline(stages: int) -> Any:
    """The same network as a list of layers, for DeepSpeed's pipeline."""
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule
    from torch import nn
    from torch.nn import functional

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)

        def forward(self, tokens):
            return self.table(tokens) + self.places(torch.arange(SEQ))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

        def forward(self, x):
            return self.head(self.norm(x))

    def loss(logits, labels):
        value = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return value * float("inf") if loss.spoiled else value

    loss.spoiled = False
    specs = [LayerSpec(First), *(LayerSpec(block_class()) for _ in range(LAYERS)), LayerSpec(Last)]
    # Each layer with a seed of its own: the same weights in whatever stage it is built.
    return PipelineModule(
        specs, num_stages=stages, loss_fn=loss, partition_method="uniform", seed_layers=True, base_seed=5
    )


def tiny_gpt(checkpointed: list[int]) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    Block = block_class()

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

        def forward(self, tokens, labels):
            x = self.table(tokens) + self.places(torch.arange(SEQ))
            for index, layer in enumerate(self.layers):
                again = index in checkpointed and torch.is_grad_enabled()
                x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    return Gpt()
