"""A decoder-only transformer of any shape as layers of known work: Llama's, and those guessed or read from a config.

    parameters of a block    attention 2 width^2 + 2 width kv_width,   feed-forward 3 width inner (gated) or 2

Normalizations have a weight and no bias, linear layers no bias; in models with biases, these are a thousandth of all
parameters.

Reference: Vaswani et al. 2017, arXiv:1706.03762; gated feed-forward: Shazeer 2020, arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from laconic.workload.roofline import LayerWork
from laconic.workload.workload import TensorShape


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The dimensions of a decoder, and the input of one rank in one step."""

    blocks: int
    width: int
    inner: int
    """Width between the two products of a feed-forward layer."""
    heads: int
    kv_heads: int
    """Of keys and values."""
    vocabulary: int
    sequence: int
    """Tokens of one sample."""
    batch: int
    gated: bool = True
    """Whether a third product gates the feed-forward layer."""
    head_width: int = 0
    """Of one head; 0: all heads together are as wide as the model."""
    tied: bool = False
    """Whether the output layer has the token embedding's weight, whose gradient is then complete with the embedding."""

    @property
    def tokens(self) -> int:
        """Of one rank in one step."""
        return self.batch * self.sequence

    @property
    def attention_width(self) -> int:
        """Of all queries together."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def kv_width(self) -> int:
        """Of all keys together."""
        return self.attention_width // self.heads * self.kv_heads


def decoder_layers(shape: DecoderShape) -> Iterator[LayerWork]:
    """The layers in the order of the forward pass, tensors named as Hugging Face names Llama's."""
    yield LayerWork(
        name="model.embed_tokens",
        tensors=(TensorShape(name="model.embed_tokens.weight", shape=(shape.vocabulary, shape.width)),),
        activations=2 * shape.tokens * shape.width,
    )
    for block in range(shape.blocks):
        yield from _block(f"model.layers.{block}", shape)
    yield _normalization("model.norm", shape)
    output = _linear("lm_head", shape.width, shape.vocabulary, shape)
    yield replace(output, tensors=()) if shape.tied else output


def _block(name: str, shape: DecoderShape) -> Iterator[LayerWork]:
    width, inner, tokens = shape.width, shape.inner, shape.tokens
    yield _normalization(f"{name}.input_layernorm", shape)
    yield _linear(f"{name}.self_attn.q_proj", width, shape.attention_width, shape)
    yield _linear(f"{name}.self_attn.k_proj", width, shape.kv_width, shape)
    yield _linear(f"{name}.self_attn.v_proj", width, shape.kv_width, shape)
    yield LayerWork(
        name=f"{name}.self_attn",
        flops=2 * 2 * tokens * shape.sequence * shape.attention_width,  # scores, then the mixture of values
        # Rotated queries and keys are read and written; then fused: scores never reach memory.
        activations=tokens * (4 * shape.attention_width + 4 * shape.kv_width),
    )
    yield _linear(f"{name}.self_attn.o_proj", shape.attention_width, width, shape)
    yield _normalization(f"{name}.post_attention_layernorm", shape)
    activation = LayerWork(name=f"{name}.mlp.act_fn", activations=2 * tokens * inner)
    if shape.gated:
        yield _linear(f"{name}.mlp.gate_proj", width, inner, shape)
        yield activation
        yield _linear(f"{name}.mlp.up_proj", width, inner, shape)
        yield LayerWork(name=f"{name}.mlp", activations=3 * tokens * inner)  # gate times up
    else:
        yield _linear(f"{name}.mlp.up_proj", width, inner, shape)
        yield activation
    yield _linear(f"{name}.mlp.down_proj", inner, width, shape)


def _linear(name: str, width: int, out: int, shape: DecoderShape) -> LayerWork:
    return LayerWork(
        name=name,
        tensors=(TensorShape(name=f"{name}.weight", shape=(out, width)),),
        flops=2 * shape.tokens * width * out,
        activations=shape.tokens * (width + out),
    )


def _normalization(name: str, shape: DecoderShape) -> LayerWork:
    """RMS normalization and the addition before it: each reads and writes once."""
    return LayerWork(
        name=name,
        tensors=(TensorShape(name=f"{name}.weight", shape=(shape.width,)),),
        activations=4 * shape.tokens * shape.width,
    )
