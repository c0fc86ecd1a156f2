"""A training job as data: its layers, their tensors, and how long each takes to compute.

One file per family of known models; each is listed in the table below and computed only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from laconic.errors import UsageError, did_you_mean, one_line
from laconic.workload import bert, gpt2, llama, resnet50, vgg16
from laconic.workload.codecs import CodecCost
from laconic.workload.workload import DTYPES, Layer, TensorShape, Workload

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "resnet50": resnet50.resnet50,
    "vgg16": vgg16.vgg16,
    "bert-base": bert.bert_base,
    "bert-large": bert.bert_large,
    "gpt2": gpt2.gpt2,
    "gpt2-xl": gpt2.gpt2_xl,
    "llama-7b": llama.llama_7b,
    "llama-70b": llama.llama_70b,
}
"""The known models by name."""
IMAGE_WORKLOADS = ("resnet50", "vgg16")
"""Those that learn from images; all others learn from text."""

__all__ = ["DTYPES", "IMAGE_WORKLOADS", "WORKLOADS", "CodecCost", "Layer", "TensorShape", "Workload", "workload"]


def workload(name_or_path: str | Path) -> Workload:
    """The known model of that name, or the workload in a .json file."""
    text = str(name_or_path)
    if text in WORKLOADS:
        return WORKLOADS[text]()
    path = Path(name_or_path)
    if path.suffix.lower() == ".json":
        return Workload.load(path)
    raise UsageError(
        f'there is no workload "{one_line(text, 80)}". {did_you_mean(text, WORKLOADS)} '
        "Or give a .json file that describes one (docs/workloads.md)."
    )
