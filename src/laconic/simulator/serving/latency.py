"""Time to first token and time per output token of a closed loop of clients.

Aggregated: the same GPUs run prefill and decode, so that requests wait for each other's passes (closed_loop.py):

    first token = request + clients * client + passes * time per token + handling, wait and pass over the prompt

`passes` are those that a framework lets go by before it looks for new requests or hands tokens out. Where the cache
does not hold all sequences, the others wait for a place, and their first token with them.

Disaggregated: separate workers run prefill, and the KV cache moves to the workers that run decode. Prompts queue at the
prefill workers, and arrive there at most as fast as answers are finished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laconic.errors import ConfigurationError
from laconic.simulator.serving.closed_loop import Passes, replay
from laconic.simulator.serving.forward import ForwardPass
from laconic.simulator.serving.load import Load


@dataclass(frozen=True)
class Served:
    """The latencies that clients see, and the network's share of them."""

    first_token_s: float
    token_s: float
    network_share: float
    """The network's share of a decode pass."""
    prefill_network_share: float
    cache_transfer_s: float = 0.0


def aggregated(forward: ForwardPass, load: Load) -> Served:
    """One worker that runs prefill and decode."""
    framework = forward.framework
    per_group = max(1, round(load.concurrency / forward.deployment.dp))
    places = max(1, math.floor(_held(forward, per_group, load.mean_context)))
    decode = forward.decode(places, load.mean_context)
    prefill = forward.prefill(load.mean_input, load.mean_input)
    found = replay(
        per_group,
        load,
        places,
        Passes(
            prompt_s=lambda tokens: (
                framework.step_s + _prefill_s(forward, forward.prefill(tokens, load.mean_input).seconds)
            ),
            output_s=lambda sequences: (
                _decode_s(forward, forward.decode(sequences, load.mean_context).seconds, sequences) / framework.accepted
            ),
            mixed_sequence_s=framework.sequence_s + decode.attention_s / places,
            tokens_per_pass=framework.tokens_per_pass,
            handling_s=lambda tokens: (
                forward.deployment.dp * (framework.handling_s + framework.handling_token_s * tokens)
            ),
            poll_passes=framework.poll_passes,
            batch_wait_passes=framework.batch_wait_passes,
            batch_wait_tokens=framework.batch_wait_share * framework.tokens_per_pass,
            mixes=framework.mixes,
            accepted=framework.accepted,
        ),
    )
    first_s = _before_first_s(forward, load, framework.accepted * found.token_s) + found.first_s
    decode_s = _decode_s(forward, decode.seconds, places)
    return Served(first_s, found.token_s, decode.network_s / decode_s, prefill.network_s / prefill.seconds)


def disaggregated(
    prefill: ForwardPass,
    decode: ForwardPass,
    load: Load,
    *,
    prefill_workers: int | None = 1,
    decode_workers: int = 1,
    transfer_bytes_per_s: float = 40e9,
) -> Served:
    """Separate workers for prefill and for decode; each GPU sends its part of the cache over a NIC of its own.

    prefill_workers: None for as many as keep up with the decode workers.
    """
    if decode_workers < 1 or (prefill_workers is not None and prefill_workers < 1):
        raise ConfigurationError("serving: there must be at least one worker for prompts and one for output.")
    per_group = max(1.0, load.concurrency / (decode_workers * decode.deployment.dp))
    sequences = _held(decode, per_group, load.mean_context)
    output = decode.decode(sequences, load.mean_context)
    pass_s = _decode_s(decode, output.seconds, sequences)
    token_s = pass_s / decode.framework.accepted
    prompt = prefill.prefill(load.mean_input, load.mean_input)
    prompt_s = prefill.framework.step_s + _prefill_s(prefill, prompt.seconds)
    output_s = load.mean_output * token_s
    if prefill_workers is None:
        busy = load.concurrency * prompt_s / output_s
        prefill_workers = max(1, math.ceil(busy / prefill.deployment.dp))
    servers = prefill_workers * prefill.deployment.dp
    cache = load.mean_input * prefill.deployment.cache_per_token_bytes(prefill.framework.kv_bytes)
    transfer_s = cache / transfer_bytes_per_s
    # A request is with the prompts' workers or with the output's; those with the first wait for each other.
    cycle_s = max(prompt_s + output_s, load.concurrency * prompt_s / servers)
    queue_s = cycle_s - output_s - prompt_s
    # All clients send their first request at once: it waits for half of all prompts.
    burst_s = load.concurrency / servers / 2 * prompt_s / load.requests_per_client
    first_s = _before_first_s(prefill, load, pass_s) + prompt_s + transfer_s + max(queue_s, burst_s)
    first_s += (per_group / sequences - 1) * output_s
    return Served(first_s, token_s, output.network_s / pass_s, prompt.network_s / prompt.seconds, transfer_s)


def prompt_pass_s(forward: ForwardPass, prompt_tokens: int, prompts: int = 1) -> float:
    """A pass over prompts alone, started together: host and GPU."""
    framework, tokens = forward.framework, prompt_tokens * prompts
    passed = forward.prefill(tokens, prompt_tokens)
    beyond_s = framework.long_pass_token_s * tokens if tokens > framework.long_pass_tokens else 0.0
    return framework.step_s + _prefill_s(forward, passed.seconds) + beyond_s


def decode_pass_s(forward: ForwardPass, sequences: int, context: float) -> float:
    """One new token for each sequence: host and GPU."""
    return _decode_s(forward, forward.decode(sequences, context).seconds, sequences)


def _before_first_s(forward: ForwardPass, load: Load, pass_s: float) -> float:
    """The part of the time to first token that passes before or after the prompt's own pass."""
    framework = forward.framework
    return framework.request_s + framework.client_s * load.concurrency + framework.passes_before_first * pass_s


def _held(forward: ForwardPass, sequences: float, context: float) -> float:
    """How many of a group's sequences the cache holds; the others wait for a place."""
    room = forward.deployment.most_cached_tokens(forward.framework.kv_bytes) / context
    return min(sequences, max(1.0, room))


def _prefill_s(forward: ForwardPass, gpu_s: float) -> float:
    """A pass over a prompt alone; in passes that also produce output, starting kernels is hidden."""
    return max(gpu_s, forward.framework.prefill_launch_s * forward.deployment.model.num_hidden_layers)


def _decode_s(forward: ForwardPass, gpu_s: float, sequences: float) -> float:
    framework = forward.framework
    launching_s = framework.launch_s * forward.deployment.model.num_hidden_layers
    return framework.step_s + framework.sequence_s * sequences + max(gpu_s, launching_s)
