"""A small GPT: pre-norm transformer decoder over bytes, with the input embedding tied to the output layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from laconic.errors import UsageError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """The size of a GPT."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256


GPT_SHAPES: dict[str, GptShape] = {
    "tiny": GptShape(layers=2, width=64, heads=2, context=32),
    "small": GptShape(layers=4, width=192, heads=4, context=64),
    "medium": GptShape(layers=6, width=264, heads=6, context=64),
    "gpt2": GptShape(layers=12, width=768, heads=12, context=256, vocabulary=50257),
}
"""About 0.12 M, 1.84 M, 5.12 M and 124 M parameters."""


def gpt_shape(name: str) -> GptShape:
    """The shape called `name`."""
    if name not in GPT_SHAPES:
        raise UsageError(f'there is no model size "{name}". {did_you_mean(name, GPT_SHAPES)}')
    return GPT_SHAPES[name]


class SmallGpt(nn.Module):
    """Logits for the next token at every position."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, time) token numbers to (batch, time, vocabulary) logits."""
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of predicting each token from those before it, in nats."""
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


class _Block(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, time, width = hidden.shape
        qkv = self.qkv(self.norm_1(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return hidden + self.down(functional.gelu(self.up(self.norm_2(hidden))))
