"""One model on several GPUs: how tensor, expert and data parallelism divide it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from laconic.errors import ConfigurationError
from laconic.simulator.serving.devices import ServingDevice
from laconic.workload.transformer import Transformer

Precision = Literal["bf16", "fp8", "fp4", "int4"]
_MOST = 1 << 20
"""Of every degree."""
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625, "int4": 0.53}
"""Per weight, scales included: fp4 has an 8-bit scale for every 16, int4 a 16-bit one for every 128 or less."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A worker: the GPUs that hold one copy of the model."""

    model: Transformer
    device: ServingDevice
    precision: Precision = "bf16"
    tp: int = 1
    """The number of GPUs that attention and dense layers are divided among."""
    dp: int = 1
    """The number of groups of `tp` GPUs; each serves requests of its own, and all share the experts."""
    ep: int = 1
    """The number of groups of GPUs that experts are distributed over; inside a group each expert is divided."""

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep"):
            if not 1 <= getattr(self, name) <= _MOST:
                bound = "at least 1" if getattr(self, name) < 1 else f"at most {_MOST}"
                raise ConfigurationError(f"serving: {name} must be {bound}, got {getattr(self, name)}.")
        if self.dp > 1 and not self.model.is_mixture:
            raise ConfigurationError(
                "serving: dp is for models with experts. For a dense model leave it out, and use more workers."
            )
        if self.ep > 1 and not self.model.is_mixture:
            raise ConfigurationError(f"serving: {self.model.name or 'the model'} has no experts; use ep=1.")
        if self.gpus % self.ep:
            near = min((n for n in range(1, 2 * self.ep) if self.gpus % n == 0), key=lambda n: abs(n - self.ep))
            raise ConfigurationError(
                f"serving: ep={self.ep} must divide the {self.gpus} GPUs; the nearest is ep={near}."
            )

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.tp * self.dp

    @property
    def weight_bytes(self) -> float:
        """Bytes per weight."""
        return WEIGHT_BYTES[self.precision]

    @property
    def weights_per_gpu_bytes(self) -> float:
        """Bytes of weights on one GPU."""
        model = self.model
        routed = model.num_mixture_layers * sum(p.parameters for p in model.projections() if p.routed)
        return self.weight_bytes * ((model.num_parameters - routed) / self.tp + routed / self.gpus)

    def cache_per_token_bytes(self, element_bytes: float) -> float:
        """Keys and values of one token, on one GPU that serves its request."""
        model = self.model
        if model.kv_lora_rank:
            return element_bytes * model.num_hidden_layers * (model.kv_lora_rank + model.qk_rope_head_dim)
        heads = max(1.0, model.kv_heads / self.tp)
        return element_bytes * model.num_hidden_layers * heads * (model.head_width + model.value_width)

    def most_cached_tokens(self, element_bytes: float, share: float = 0.95) -> float:
        """How many tokens the KV cache can hold in addition to the weights, per group of `tp` GPUs."""
        free = self.device.memory_bytes * share - self.weights_per_gpu_bytes
        if free <= 0:
            raise ConfigurationError(
                f"serving: {self.weights_per_gpu_bytes / 1e9:.0f} GB of weights per GPU do not fit into "
                f"{self.device.memory_bytes / 1e9:.0f} GB of {self.device.name}. Use more GPUs or fewer bits."
            )
        return free / self.cache_per_token_bytes(element_bytes)
