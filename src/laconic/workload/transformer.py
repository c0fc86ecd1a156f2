"""A decoder-only transformer as data, dense or a mixture of experts: parameters and operations from its configuration.

The keys are those of a Hugging Face `config.json`. Of a layer, `projections` lists every matrix with its shape and how
tensor parallelism splits it; parameters, operations and activations all follow from that list.

    operations of a forward pass, per token and layer = 2 * sum(inputs * outputs) + 4 * context * heads * head width

where context is the number of tokens attended to: half the sequence with a causal mask, where the kernel makes use of
it, and the whole sequence otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from laconic.errors import ConfigurationError, did_you_mean, one_line

Split = Literal["column", "row", "none"]

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
_LARGEST = 10_000_000
"""Larger shapes are mistakes, and some loops run over them."""
_MOST = {"num_hidden_layers": 100_000, "max_position_embeddings": 10**15}
"""Layers are listed one by one; positions are not."""


class Projection(NamedTuple):
    """A matrix of one layer: `inputs` x `outputs`, `experts` times where there are several of its kind."""

    name: str
    inputs: int
    outputs: int
    split: Split
    """Tensor parallelism gives each rank a share of the outputs (column), of the inputs (row), or all of it (none)."""
    bias: bool = False
    experts: int = 1
    """How many there are, each for its own share of the tokens."""
    active: int = 1
    """How many of them each token passes."""

    @property
    def parameters(self) -> int:
        """Parameters of all these matrices together."""
        return self.experts * (self.inputs * self.outputs + (self.outputs if self.bias else 0))

    @property
    def routed(self) -> bool:
        """Whether a router decides which tokens pass it."""
        return self.experts > 1


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A model's shape. Zero experts: dense."""

    name: str = ""
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int
    num_key_value_heads: int = 0
    """0: as many as heads of queries."""
    head_dim: int = 0
    """0: hidden_size / num_attention_heads."""
    gated: bool = True
    """Three matrices in the feed-forward part, as with SwiGLU; otherwise two."""
    bias: bool = False
    """Biases on all projections, and on normalizations."""
    attention_bias: bool = False
    """A bias on queries, keys and values alone, where `bias` is not set."""
    qk_norm: bool = False
    """Queries and keys are normalized per head."""
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 0
    """Learned positions; 0 where positions are rotated or biased and have no parameters."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    """So many layers at the front are dense."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """Latent attention, where not 0."""
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int):
                continue
            least, most = int(field.name in _NEEDED), _MOST.get(field.name, _LARGEST)
            if not least <= value <= most:
                bound = f"at least {least}" if value < least else f"at most {most}"
                raise ConfigurationError(f"model {self.name}: {field.name} must be {bound}, got {value}.")
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ConfigurationError(
                f"model {self.name}: first_k_dense_replace must be at most num_hidden_layers = "
                f"{self.num_hidden_layers}, got {self.first_k_dense_replace}."
            )
        heads = self.num_attention_heads
        if not self.head_dim and self.hidden_size % heads:
            divisors = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0]
            near = min(divisors, key=lambda n: abs(n - heads))
            raise ConfigurationError(
                f"model {self.name}: hidden_size {self.hidden_size} is not divisible by {heads} heads. "
                f"The nearest number of heads that divides it is {near}; or give head_dim."
            )
        if self.num_key_value_heads and heads % self.num_key_value_heads:
            raise ConfigurationError(
                f"model {self.name}: {heads} heads cannot share {self.num_key_value_heads} heads of keys and values; "
                "one number must divide the other."
            )
        if bool(self.num_experts) != bool(self.num_experts_per_tok):
            raise ConfigurationError(f"model {self.name}: num_experts and num_experts_per_tok go together.")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigurationError(
                f"model {self.name}: num_experts_per_tok must be at most num_experts = {self.num_experts}, "
                f"got {self.num_experts_per_tok}."
            )

    # -- shapes ----------------------------------------------------------------------------------------------------

    @property
    def head_width(self) -> int:
        """Of a query or a key."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def value_width(self) -> int:
        """Of one head's value."""
        return self.v_head_dim or self.head_width

    @property
    def attention_width(self) -> int:
        """Of all heads of queries together."""
        return self.num_attention_heads * self.head_width

    @property
    def is_mixture(self) -> bool:
        """Whether there are experts."""
        return self.num_experts > 0

    @property
    def num_mixture_layers(self) -> int:
        """Layers with experts."""
        return self.num_hidden_layers - self.first_k_dense_replace if self.is_mixture else 0

    def projections(self, *, mixture: bool | None = None) -> Iterator[Projection]:
        """Every matrix of one layer; `mixture`: whether that has experts, where a model has both kinds."""
        yield from self._attention()
        if self.is_mixture if mixture is None else mixture:
            yield from self._experts()
        else:
            yield from self._feed_forward("mlp", self.intermediate_size)

    def _attention(self) -> Iterator[Projection]:
        width, heads = self.hidden_size, self.num_attention_heads
        bias = self.bias or self.attention_bias
        if self.kv_lora_rank:
            nope = self.head_width - self.qk_rope_head_dim
            yield Projection("q_a", width, self.q_lora_rank, "none")
            yield Projection("q_b", self.q_lora_rank, self.attention_width, "column")
            yield Projection("kv_a", width, self.kv_lora_rank + self.qk_rope_head_dim, "none")
            yield Projection("kv_b", self.kv_lora_rank, heads * (nope + self.value_width), "column")
        else:
            queries, keys = self.attention_width, self.kv_heads * self.head_width
            yield Projection("qkv", width, queries + 2 * keys, "column", bias)
        yield Projection("o", heads * self.value_width, width, "row", self.bias)

    def _feed_forward(self, name: str, inner: int) -> Iterator[Projection]:
        width = self.hidden_size
        yield Projection(f"{name}.up", width, inner * (2 if self.gated else 1), "column", self.bias)
        yield Projection(f"{name}.down", inner, width, "row", self.bias)

    def _experts(self) -> Iterator[Projection]:
        yield Projection("router", self.hidden_size, self.num_experts, "none")
        inner = self.moe_intermediate_size or self.intermediate_size
        for projection in self._feed_forward("expert", inner):
            yield projection._replace(experts=self.num_experts, active=self.num_experts_per_tok)
        if self.n_shared_experts:
            yield from self._feed_forward("shared", self.n_shared_experts * inner)

    # -- parameters ------------------------------------------------------------------------------------------------

    def norm_parameters(self) -> int:
        """Of the normalizations in one layer."""
        found = 2 * self.hidden_size * (2 if self.bias else 1)
        if self.qk_norm:
            found += 2 * self.head_width
        if self.kv_lora_rank:
            found += self.q_lora_rank + self.kv_lora_rank
        return found

    def layer_parameters(self, *, mixture: bool | None = None) -> int:
        """Of one layer."""
        has_experts = self.is_mixture if mixture is None else mixture
        # Models with latent attention also learn a bias per expert, by which the router is balanced.
        router_bias = self.num_experts if self.kv_lora_rank and has_experts else 0
        return sum(p.parameters for p in self.projections(mixture=mixture)) + self.norm_parameters() + router_bias

    def embedding_parameters(self) -> int:
        """Of the table of tokens, and of learned positions."""
        return (self.vocab_size + self.max_position_embeddings) * self.hidden_size

    def head_parameters(self) -> int:
        """Of the output layer and the normalization before it."""
        own = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return own + self.hidden_size * (2 if self.bias else 1)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        dense = self.num_hidden_layers - self.num_mixture_layers
        found = self.embedding_parameters() + self.head_parameters()
        if dense:
            found += dense * self.layer_parameters(mixture=False)
        if self.num_mixture_layers:
            found += self.num_mixture_layers * self.layer_parameters(mixture=True)
        return found

    @property
    def num_active_parameters(self) -> int:
        """The parameters that one token passes through."""
        unused = sum((p.experts - p.active) * p.parameters // p.experts for p in self.projections())
        return self.num_parameters - self.num_mixture_layers * unused

    def model_flops(self, tokens: float, sequence: int, *, causal: bool = True) -> float:
        """Operations of a forward and backward pass over so many tokens, as MFU counts them: nothing recomputed."""
        matrices = self.num_hidden_layers and sum(
            count * p.inputs * p.outputs * p.active
            for mixture, count in (
                (True, self.num_mixture_layers),
                (False, self.num_hidden_layers - self.num_mixture_layers),
            )
            if count
            for p in self.projections(mixture=mixture)
        )
        matrices += self.hidden_size * self.vocab_size
        context = sequence / 2 if causal else sequence
        attention = self.num_hidden_layers * self.num_attention_heads * (self.head_width + self.value_width) * context
        return 6.0 * tokens * (matrices + attention)


_RENAMED = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
_WITHOUT_EFFECT = {
    *("architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache"),
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "rms_norm_eps",
        "rope_scaling",
        "rope_theta",
    ),
    *(
        "attention_dropout",
        "attn_implementation",
        "hidden_act",
        "pretraining_tp",
        "max_window_layers",
        "qk_nope_head_dim",
    ),
    *(
        "router_aux_loss_coef",
        "router_jitter_noise",
        "output_router_logits",
        "norm_topk_prob",
        "aux_loss_alpha",
        "seq_aux",
    ),
    *("scoring_func", "topk_group", "topk_method", "n_group", "routed_scaling_factor", "moe_layer_freq", "ep_size"),
    *("decoder_sparse_step", "quantization_config"),
}
"""Keys of published configurations that change neither shapes nor operations."""
_ONLY_UNSET = ("mlp_bias", "use_sliding_window", "sliding_window", "num_nextn_predict_layers", "mlp_only_layers")
"""Keys that would change something that is not modelled."""
_UNGATED = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


def from_config(config: Mapping[str, object], name: str = "") -> Transformer:
    """The model that a Hugging Face configuration describes; unknown keys are refused."""
    known = {field.name: field for field in fields(Transformer)}
    values: dict[str, object] = {"name": name or str(config.get("model_type", ""))}
    for key, value in config.items():
        key = _RENAMED.get(key, key)
        if key in _WITHOUT_EFFECT:
            continue
        if key in _ONLY_UNSET:
            if value:
                raise ConfigurationError(
                    f"model configuration: {key} is not modelled; it must be unset, got {value!r}."
                )
            continue
        if key not in known:
            raise ConfigurationError(
                f'model configuration: there is no key "{one_line(key, 40)}". {did_you_mean(key, known)}'
            )
        expected = {"bool": bool, "int": int, "str": str}[str(known[key].type)]
        if value is None and expected is int:
            value = 0
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            raise ConfigurationError(f"model configuration: {key} must be of type {expected.__name__}, got {value!r}.")
        values[key] = value
    if "qk_nope_head_dim" in config and "head_dim" not in config:
        nope, rope = config["qk_nope_head_dim"], config.get("qk_rope_head_dim", 0)
        if not (isinstance(nope, int) and isinstance(rope, int)):
            raise ConfigurationError(
                "model configuration: qk_nope_head_dim and qk_rope_head_dim must be whole numbers."
            )
        values["head_dim"] = nope + rope
    if config.get("model_type") in _ROTATED:
        # Their positions have no parameters; the key is the longest sequence.
        values["max_position_embeddings"] = 0
    if config.get("hidden_act") in _UNGATED:
        values.setdefault("gated", False)
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise ConfigurationError(f"model configuration: {', '.join(missing)} must be given.")
    return Transformer(**values)  # pyrefly: ignore


_ROTATED = {"llama", "mixtral", "deepseek_v3", "qwen3_moe", "qwen3", "mistral"}
