"""`laconic simulate --serve "model=... tp=1,2,4,8 ..."`: latency of serving a model, and what the network costs.

With --json, one document:

    {"model": str, "device": str, "precision": str, "framework": str, "input": int, "output": int,
     "rows": [{"tp", "dp", "ep", "concurrency", "link", "gpus", "refused": str or null,
               "first_token_s", "token_s", "tokens_per_s_per_gpu", "network_share", "prefill_network_share",
               "cache_transfer_s"}],
     "worth_it": [str], "warnings": [str]}
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from laconic.cli.terminal import emit_json, emit_sections, plain_table
from laconic.simulator.serving.plan import ServePoint, ServeSweep, serve

_ENOUGH = 0.7
"""Doubling GPUs is worth it for latency if the time per token falls to at most this share."""


def print_serving(text: str, *, as_json: bool) -> None:
    """Simulate the settings in the text of --serve and print the result."""
    sweep = serve(text)
    if as_json:
        emit_json(_document(sweep))
        return
    table = plain_table(
        *("tp", "dp", "ep", "requests", "link", "GPUs", "first token", "per token", "tokens/s/GPU", "network"),
        numbers=("tp", "dp", "ep", "requests", "GPUs", "first token", "per token", "tokens/s/GPU", "network"),
    )
    for point in sweep.points:
        shape = (str(point.tp), str(point.dp), str(point.ep), str(point.concurrency), point.link, str(point.gpus))
        if point.served is None:
            table.add_row(*shape, "", "", "", "")
            continue
        found = point.served
        table.add_row(
            *shape,
            f"{1e3 * found.first_token_s:,.0f} ms",
            f"{1e3 * found.token_s:,.1f} ms",
            f"{point.tokens_per_s_per_gpu:,.0f}",
            f"{found.network_share:.0%}",
        )
    head = (
        f"{sweep.model} with {sweep.precision} on {sweep.device}, {sweep.framework}: prompts of "
        f"{sweep.load.input_tokens} tokens, answers of {sweep.load.output_tokens}. network: share of an output pass."
    )
    refused = [f"tp={point.tp}: {point.refused}" for point in sweep.points if point.refused]
    notes = "\n".join([*worth_it(sweep.points), *dict.fromkeys(refused), *(f"Note: {word}" for word in sweep.warnings)])
    emit_sections(head, table, *([notes] if notes else []))


def worth_it(points: Sequence[ServePoint]) -> list[str]:
    """Which tensor-parallel degree and which link pay off."""
    lines: list[str] = []
    served = [point for point in points if point.served is not None]
    if len(served) < 2:
        return lines
    best = max(served, key=lambda point: point.tokens_per_s_per_gpu)
    fastest = min(served, key=lambda point: point.served.token_s if point.served else 0.0)
    lines.append(
        f"Most tokens per GPU: tp={best.tp} on {best.link}. Least time per token: tp={fastest.tp} on {fastest.link}."
    )
    for few, many in pairwise(served):
        same = (few.link, few.dp, few.ep, few.concurrency) == (many.link, many.dp, many.ep, many.concurrency)
        if not same or many.gpus <= few.gpus or few.served is None or many.served is None:
            continue
        ratio = many.served.token_s / few.served.token_s
        verdict = "worth it" if ratio <= _ENOUGH else "hardly worth it"
        lines.append(
            f"{few.link}: from tp={few.tp} to tp={many.tp} a token takes {ratio:.0%} of the time with "
            f"{many.gpus / few.gpus:.0f} x the GPUs, {many.served.network_share:.0%} of it network: {verdict} for "
            "latency."
        )
    return lines


def _document(sweep: ServeSweep) -> dict[str, object]:
    rows: list[dict[str, object]] = []
    for point in sweep.points:
        row: dict[str, object] = {
            "tp": point.tp,
            "dp": point.dp,
            "ep": point.ep,
            "concurrency": point.concurrency,
            "link": point.link,
            "gpus": point.gpus,
            "refused": point.refused,
        }
        if point.served is not None:
            row |= {
                "first_token_s": point.served.first_token_s,
                "token_s": point.served.token_s,
                "tokens_per_s_per_gpu": point.tokens_per_s_per_gpu,
                "network_share": point.served.network_share,
                "prefill_network_share": point.served.prefill_network_share,
                "cache_transfer_s": point.served.cache_transfer_s,
            }
        rows.append(row)
    return {
        "model": sweep.model,
        "device": sweep.device,
        "precision": sweep.precision,
        "framework": sweep.framework,
        "input": sweep.load.input_tokens,
        "output": sweep.load.output_tokens,
        "rows": rows,
        "worth_it": worth_it(sweep.points),
        "warnings": list(sweep.warnings),
    }
