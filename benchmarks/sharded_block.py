"""What compressed FSDP2 costs a block of a large model beside the block's own forward and backward pass.

    python -m benchmarks.sharded_block [--device cuda] [--width 4096] [--heads 32] [--tokens 4096] [--shards 8]

One process plays one of the ranks: it encodes all rows of the block's gradient and adds up one row of every rank, and
encodes its own row of the weights and decodes everybody's, twice. Bytes travel nowhere, so what is timed is coding
alone. The passes compute in bfloat16 with FlashAttention where there is one, gradients are in the dtype of
--gradients, as MixedPrecisionPolicy(reduce_dtype=...) says. Three runs take turns: passes, coding, and both one after
the other. Times are wall clock over a run. A share is the time by which both together take longer than passes: when
coding runs alone, a GPU waits for its host, which has little else to do during the passes of a large block.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from laconic.architecture.sharded import Sharded
from laconic.core.exchange import Exchange, Wire
from laconic.core.moment import Moment
from laconic.core.shard_rows import by_owner, row_of
from laconic.core.tensor import TensorSpec
from laconic.core.transport import DoneWork, Transport, Work
from laconic.experiments.small_gpt import GptShape, SmallGpt
from laconic.strategy import Strategy

STRATEGIES = (
    "bsp / sharded(weights=bf16) / bf16",
    "bsp / sharded(weights=int8) / int8",
    "bsp / sharded(weights=int8) / int4",
    "bsp / sharded(weights=int8) / int4 + error_feedback(residual=bfloat16)",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Nowhere:
    """A transport of one rank among many whose bytes do not travel: what arrives is whatever was in memory."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def all_to_all(self, received: torch.Tensor, rows: torch.Tensor, **_: object) -> Work:
        received[0] = rows[0]  # something that can be decoded
        return DoneWork()

    def all_gather(self, rows: torch.Tensor, row: torch.Tensor, **_: object) -> Work:
        rows[0] = row
        return DoneWork()


class Coding:
    """What one rank codes for one block in one step."""

    def __init__(self, block: nn.Module, text: str, shards: int, gradients: torch.dtype) -> None:
        strategy = Strategy.parse(text)
        self._sharded = cast(Sharded, strategy.architecture)
        self._wire = Wire(cast(Transport, Nowhere(shards)), "a block")
        specs = [TensorSpec.of(name, parameter) for name, parameter in block.named_parameters()]
        device = specs[0].device
        summed = [TensorSpec(spec.name, spec.shape, gradients, device) for spec in specs]
        passed = [TensorSpec(spec.name, spec.shape, torch.bfloat16, device) for spec in specs]
        self._state = strategy.init(by_owner(summed, shards))
        weights = by_owner(passed, shards)
        self._codec, self._weights_codec = strategy.codec, strategy.weights_codec
        self._weights = self._sharded.init_weights(self._weights_codec, weights, shards)
        width = row_of(weights, shards).numel
        for state in (self._state, self._weights):
            state.moment, state.measure = Moment.steady(shards), False
        self._rows = torch.randn(shards, width, dtype=gradients, device=device)
        self._sum = torch.empty(width, dtype=gradients, device=device)
        self._row = torch.randn(width, dtype=torch.bfloat16, device=device)
        self._gathered = torch.empty(shards, width, dtype=torch.bfloat16, device=device)

    def step(self) -> None:
        """Weights for the forward and for the backward pass, then the gradient."""
        for _ in range(2):
            _run(self._sharded.gather(self._row, self._weights, self._weights_codec, self._wire, self._gathered))
        _run(self._sharded.scatter(self._rows, self._state, self._codec, self._wire, self._sum))


def _run(exchange: Exchange) -> None:
    for work in exchange:
        work.wait()


def _passes(block: nn.Module, tokens: int, width: int, device: torch.device) -> Callable[[], None]:
    inputs = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            out = block(inputs)
        out.backward(out.detach())
        for parameter in block.parameters():
            parameter.grad = None

    return step


def _compared(
    passes: Callable[[], None], coding: Callable[[], None], repeats: int, turns: int, device: torch.device
) -> str:
    def both() -> None:
        passes()
        coding()

    for step in (passes, coding, both):
        step()
    times = [[_seconds(step, repeats, device) for step in (passes, coding, both)] for _ in range(turns)]
    shares = [(together - computed) / computed for computed, _, together in times]
    computed, coded, together = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return (
        f"passes {computed:8.2f} ms  coding {coded:7.2f} ms  both {together:8.2f} ms  {statistics.median(shares):6.1%} "
        f"({min(shares):.1%} to {max(shares):.1%})"
    )


def _seconds(step: Callable[[], None], repeats: int, device: torch.device) -> float:
    _wait(device)
    began_s = time.perf_counter()
    for _ in range(repeats):
        step()
    _wait(device)
    return (time.perf_counter() - began_s) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    """Print a line for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=4096, help="of the model; its MLP is four times as wide")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="of one rank in one pass")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--gradients", choices=list(DTYPES), nargs="+", default=list(DTYPES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    shape = GptShape(layers=1, width=options.width, heads=options.heads, context=8, vocabulary=8)
    block = SmallGpt(shape).blocks[0].to(device)
    numel = sum(parameter.numel() for parameter in block.parameters())
    print(f"a block of {numel / 1e6:.0f} M parameters, {options.shards} shards")
    for tokens in options.tokens:
        passes = _passes(block, tokens, options.width, device)
        for gradients in options.gradients:
            for text in options.strategies:
                coding = Coding(block, text, options.shards, DTYPES[gradients])
                shown = _compared(passes, coding.step, options.repeats, options.turns, device)
                print(f"{tokens:6} tokens  gradients {gradients:9} {text:72} {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
