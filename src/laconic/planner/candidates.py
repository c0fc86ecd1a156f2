"""The strategies that are considered, with their settings: first one of each kind, then variants of the best ones.

They include every strategy whose loss was measured or published, and some methods without a known loss, so that the
answer can name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from laconic.errors import LaconicError
from laconic.planner.question import Question
from laconic.strategy import PRESETS, Strategy
from laconic.units import MIB

DDP = Strategy()
"""What torch's DistributedDataParallel does."""
FSDP = Strategy.parse("bsp / sharded / none / fusion")
"""What torch's fully_shard does."""
_SCHEDULES = ("fusion(bytes=1MiB)", "fusion(bytes=5MiB)", "fusion", "fusion(bytes=100MiB)", "mg_wfbp")
_PRIORITY_PIECES, _DEAR_BUCKETS = 256, (128, 32)
"""The approximate number of pieces of a model: finer ones gain next to nothing."""
_PRIORITY_MIB, _DEAR_MIB = 2, 4
"""The least size of a piece."""
_COMPRESSIONS = (
    "bf16",
    "int8",
    "qsgd",
    "int4",
    "terngrad",
    "signsgd",
    "onebit + error_feedback",
    "powersgd + error_feedback",
    "powersgd(rank=16) + error_feedback",
    "topk",
    "topk(density=0.1) + error_feedback",
    "topk + chain + error_feedback",
    "int4 + ef21",
)
"""Of methods that send the same number of bytes, only one: bf16 instead of fp16, in which gradients may overflow; int8
instead of fp8 and natural, from which seeds do not tell it apart; topk instead of sidco, which loses more. What it
takes dct_cyclic to encode is not known, so dct_topk remains."""
_BETWEEN_HOSTS = ("bf16", "int8", "qsgd", "int4", "terngrad")
_WITH_WARMUP = ("powersgd + error_feedback", "onebit + error_feedback", "topk(density=0.1) + error_feedback")
_LOCAL = (
    "local_sgd(period=8)",
    "local_sgd",
    "slowmo(period=8)",
    *(f"diloco(period={period})" for period in (16, 32, 64, 100)),
    *(f"streaming_diloco(period={period}) / all_reduce / int4 + error_feedback" for period in (16, 32, 64, 100)),
    "diloco / all_reduce / int8",
    "diloco / all_reduce / topk(density=0.03) + chain(second=int4) + error_feedback",
    "decoupled_momentum / all_reduce / dct_topk",
)
_OTHERS = (
    "demo-int4",
    "demo / all_reduce / dct_topk(density=0.0156) + chain(second=int4)",
    "onebit-adam",
    "d-psgd",
    "sgp",
    "ad-psgd",
    "bsp / choco / int8",
    "ssp / parameter_server",
    "asp / parameter_server",
)
_ISLANDS = (
    "bsp / all_reduce / none",
    "bsp / all_reduce / int8",
    "bsp / all_reduce / qsgd",
    *(f"diloco(period={period})" for period in (16, 32, 64, 100)),
    *(f"streaming_diloco(period={period}) / all_reduce / int4 + error_feedback" for period in (32, 100)),
)
_SHARDED = ("none", "int8")
"""Compressors of gradients under FSDP2; weights are not compressed."""
_FIRST_SCHEDULE = "fusion"
_MOST_SERVERS = 64
"""Workers up to which servers are considered; beyond, each would have too many connections."""


def first_candidates(question: Question) -> list[Strategy]:
    """One of each kind, and every lossless strategy with every schedule."""
    return _legal(_texts(question))


def candidates_between_islands() -> list[Strategy]:
    """Strategies between hosts where each host is one worker."""
    return _legal(_ISLANDS)


def other_forms(strategy: Strategy, question: Question) -> list[Strategy]:
    """The strategy with other buckets and schedules; strategies that wait for whole rounds gain nothing from that."""
    if not strategy.exchanges_gradients() or strategy.architecture.holds_shards:
        return []
    what = str(strategy).rpartition(" / ")[0]
    found = _legal(f"{what} / {schedule}" for schedule in schedules(question))
    return [other for other in found if other != strategy]


def schedules(question: Question) -> list[str]:
    """Schedules with bucket sizes that suit the model."""
    nbytes = question.workload.gradient_bytes

    def mebibytes(pieces: int, least: int) -> int:
        """A power of two that cuts the model into at most this many pieces."""
        return max(least, 1 << max(0, (nbytes // (pieces * MIB)).bit_length()))

    dear = dict.fromkeys(f"dear(bytes={mebibytes(pieces, _DEAR_MIB)}MiB)" for pieces in _DEAR_BUCKETS)
    return [*_SCHEDULES, f"priority(partition_bytes={mebibytes(_PRIORITY_PIECES, _PRIORITY_MIB)}MiB)", *dear]


def _texts(question: Question) -> Iterator[str]:
    cluster, workers = question.setting.cluster, question.setting.workers
    several = cluster.devices_per_host > 1 and not question.is_one_host
    yield from (*_LOCAL, *_OTHERS)
    yield from (f"bsp / all_reduce / none / {schedule}" for schedule in schedules(question))
    for algorithm in ("halving_doubling", "double_tree", *(["hierarchical"] if several else [])):
        yield f"bsp / all_reduce(algorithm={algorithm}) / none / fusion"
    if workers <= _MOST_SERVERS:
        for shards in dict.fromkeys((0, cluster.num_hosts if several else max(1, workers // 2))):
            yield f"bsp / parameter_server(shards={shards}) / none / fusion"
    yield from (f"bsp / sharded / {code} / fusion" for code in _SHARDED)
    compressions = [*_COMPRESSIONS]
    if question.workload.dtype.itemsize <= 2:
        compressions.remove("bf16")  # gradients have no more than 16 bits as they are
    warmup = max(1, -(-question.steps // 4))
    compressions += [f"{code} + warmup(steps={warmup})" for code in _WITH_WARMUP]
    yield from (f"bsp / all_reduce / {code} / {_FIRST_SCHEDULE}" for code in compressions)
    if several:
        yield from (
            f"bsp / all_reduce(algorithm=hierarchical, compress=between_hosts) / {code} / {_FIRST_SCHEDULE}"
            for code in _BETWEEN_HOSTS
            if code in compressions
        )


def _legal(texts: Iterable[str]) -> list[Strategy]:
    """The legal strategies, each once."""
    found: dict[str, Strategy] = {}
    for text in texts:
        try:
            strategy = Strategy.parse(text)
        except LaconicError:
            continue  # a schedule or a wrapper that cannot be combined with it
        found[str(strategy)] = strategy
    return list(found.values())


def short_name(strategy: Strategy) -> str:
    """The name of an equal preset, if there is one; else the text, without the default schedule."""
    text = str(strategy)
    return _preset_names().get(text, text.removesuffix(f" / {DDP.scheduling}"))


@lru_cache(maxsize=1)
def _preset_names() -> dict[str, str]:
    """The first preset with each text."""
    names: dict[str, str] = {}
    for name, (written, _) in PRESETS.items():
        names.setdefault(str(Strategy.parse(written)), name)
    return names
