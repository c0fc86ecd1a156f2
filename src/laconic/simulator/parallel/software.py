"""How a framework runs a layer: which kernels are fused, what is overlapped, what the optimizer moves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from laconic.simulator.parallel.work import Kernel


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training framework, as far as time depends on it."""

    name: str
    fused_attention: bool = True
    """One kernel for the attention of a layer; otherwise scores are written to memory."""
    skips_masked: bool = True
    """Fused attention computes only what a causal mask leaves."""
    attention_window: int = 0
    """Tokens that each token attends to; 0: all before it."""
    parallel_blocks: bool = False
    """Attention and feed-forward part read the same normalized input: one normalization, one pair of exchanges."""
    balances_context: bool = True
    """Context-parallel ranks hold parts of a sequence with equal work; otherwise consecutive parts."""
    dropout: bool = False
    weight_product_rate: float = 1.0
    """Speed of products with weights, relative to 16-bit numbers; above 1 with 8-bit ones."""
    extra_passes: float = 0.0
    """Further reads and writes of the residual path per layer, by kernels that are not fused, in such tensors."""
    layer_launch_s: float = 0.0
    """Time of the host to launch the forward pass of one layer; a backward pass takes twice as long."""
    launch_norm: float = 4.0
    """How sharply the slower of host and GPU decides; see `launch_wait_s`."""
    launch_domain: int = 4
    """GPUs of one processor socket; threads of wider tensor-parallel groups wait for each other across sockets."""
    wide_launch_s: float = 0.0
    """layer_launch_s of tensor-parallel groups that are wider than launch_domain."""
    overlaps_tensor_backward: bool = False
    """Exchanges among tensor-parallel ranks overlap with the product for the weights' gradient in the backward pass."""
    tensor_overlap: float = 0.0
    """Share of the exchanges among tensor-parallel ranks that is hidden, by splitting products into pieces."""
    tokens_once_per_node: bool = False
    """A token crosses the network once for all its experts in a node, as with DeepEP; otherwise once for each."""
    expert_overlap: float = 0.0
    """Share of the tokens' all-to-all that is hidden behind the compute of other tokens."""
    overlaps_gradients: bool = False
    """The data-parallel exchange overlaps with the backward pass."""
    overlaps_parameters: bool = False
    """The all-gather of sharded parameters overlaps with the forward pass."""
    exchanges_every_micro_batch: bool = False
    """Every micro-batch gathers sharded parameters and exchanges gradients also with zero=0 and 2, as FSDP does outside
    of no_sync(): SHARD_GRAD_OP is zero=2. Otherwise gradients of zero=0 are exchanged, and parameters of zero=2
    gathered, once per step."""
    shard_messages: int = 1
    """Messages into which the gathers and scatters of a layer are divided with zero=3: 1, or one per tensor."""
    interference: float = 0.0
    """Seconds that compute loses per second of hidden gathers and scatters of FSDP, which use the same processors."""
    overlaps_pipeline: bool = False
    """Messages between stages overlap with compute."""
    scatter_gather: bool = False
    """Each tensor-parallel rank sends its share of a message between stages, which is gathered inside the node."""
    gradient_bytes: int = 2
    """Bytes of one element in the data-parallel exchange."""
    optimizer_bytes: float = 46.0
    """Bytes that the optimizer's step reads and writes per parameter, casts and the gradient norm included."""
    parameter_bytes: float = 2.0
    """Bytes stored per parameter for the forward pass."""
    stored_gradient_bytes: float = 4.0
    """Bytes stored per parameter for its gradient."""
    state_bytes: float = 12.0
    """Bytes stored per parameter by the optimizer: 32-bit parameter and two moments."""
    logit_bytes: float = 12.0
    """Bytes stored per logit at the end of the forward pass: 16 and 32 bits, and the gradient likewise."""
    gathered_layers: float = 3.0
    """Layers whose parameters are gathered at once with zero=3: in use, fetched ahead, and the gradient."""
    allocator_factor: float = 1.06
    """Memory that the caching allocator reserves, relative to the memory requested."""
    gradient_buckets: int = 8
    """Pieces of the data-parallel exchange, where it is overlapped; the last one is always exposed."""
    selective_share: float = 0.0
    """recompute=selective repeats the attention, or this share of the forward pass where it is above 0."""
    step_s: float = 0.0
    """Constant time per step that does not depend on the model."""

    def residual(self, elements: float) -> Kernel:
        """Two normalizations and two residual additions of a layer over this many 16-bit elements."""
        mask = 1 if self.dropout else 0
        parts = 1 if self.parallel_blocks else 2
        forward = parts * (4 + 6 + mask) + 4 * self.extra_passes
        # A normalization reads its input and the gradient and writes a gradient; an addition passes it on twice.
        backward = parts * (6 + 6 + (4 + mask if self.dropout else 0)) + 4 * self.extra_passes
        return Kernel(forward * elements, backward * elements)

    def activation(self, elements: float, *, gated: bool) -> Kernel:
        """The activation function over this many elements of the inner width."""
        return Kernel((6 if gated else 4) * elements, (10 if gated else 6) * elements)

    def scores(self, elements: float) -> Kernel:
        """Masked softmax, then dropout, over the scores; the products read and write them as well."""
        dropout = 5 if self.dropout else 0
        return Kernel((4 + dropout) * elements, (6 + dropout) * elements)

    def loss(self, elements: float) -> Kernel:
        """Cross entropy over this many logits, in 32-bit numbers."""
        return Kernel(18 * elements, 10 * elements)

    def launch_wait_s(self, tp: int, busy_s: float, launches: int = 1) -> float:
        """The time that the GPU waits for the host, in a pass of one layer that keeps the GPU busy for `busy_s`.

        Where one of them is much slower, the pass takes as long as that one; where both are similar, short kernels wait
        for the host and long ones do not, so it takes longer than either: a norm of both, not their maximum.
        """
        host_s = launches * (self.layer_launch_s if tp <= self.launch_domain else self.wide_launch_s)
        if not host_s:
            return 0.0
        return (busy_s**self.launch_norm + host_s**self.launch_norm) ** (1 / self.launch_norm) - busy_s

    def exposed_s(self, whole_s: float, beside_s: float) -> float:
        """The exposed time of an overlapped exchange: its last piece, or the part that compute does not cover."""
        return max(whole_s / self.gradient_buckets, whole_s - beside_s)

    def selective_s(self, forward_s: float, attention_s: float) -> float:
        """The time that recompute=selective adds to the backward pass of a layer."""
        return self.selective_share * forward_s if self.selective_share else attention_s


MEGATRON_2022 = Software(
    name="Megatron-LM, 2021-2022",
    fused_attention=False,
    dropout=True,
    overlaps_tensor_backward=True,
    scatter_gather=True,
    gradient_bytes=4,
)
"""Scores are written to memory; the softmax is fused with scale and mask."""
MEGATRON_2021 = replace(MEGATRON_2022, name="Megatron-LM, 2021", overlaps_tensor_backward=False, gradient_bytes=2)
"""The version of the SC21 paper: exchanges of the tensor dimension are not overlapped yet, gradients have 16 bits."""
MEGATRON_CORE = Software(
    name="Megatron-Core",
    extra_passes=15.1,
    overlaps_tensor_backward=True,
    tensor_overlap=0.8,
    overlaps_gradients=True,
    overlaps_parameters=True,
    overlaps_pipeline=True,
    scatter_gather=True,
    gradient_bytes=4,
    optimizer_bytes=40.0,
)
"""Everything that overlaps is switched on; extra_passes as MPT's H100 rows gave it for layers without torch.compile."""
