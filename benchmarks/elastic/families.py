"""One strategy of each kind that can be elastic."""

from __future__ import annotations

FAMILIES = {
    "sequential": "bsp / all_reduce(algorithm=ring) / none / sequential",
    "wfbp": "bsp / all_reduce / topk(0.05) + error_feedback / wfbp",
    "fusion": "bsp / all_reduce / int8 + error_feedback / fusion",
    "powersgd": "bsp / all_reduce(algorithm=ring) / powersgd(2) + error_feedback / fusion",
    "demo": "demo / all_reduce / dct_topk / fusion",
    "local_sgd": "local_sgd(period=8) / all_reduce(algorithm=ring) / none / fusion",
    "diloco": "diloco(period=8) / all_reduce / int8 + error_feedback / fusion",
    "streaming": "streaming_diloco(period=8, fragments=2, overlap=2) / all_reduce / int4 + error_feedback / fusion",
}

SHARDED_FAMILIES = {
    "sharded": "bsp / all_reduce / int8 + error_feedback / fusion",
    "sharded-diloco": "diloco(period=8) / all_reduce / int8 + error_feedback / fusion",
}
"""The same for models of which two ranks hold one copy together."""
