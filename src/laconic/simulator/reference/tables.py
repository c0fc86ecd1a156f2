"""Every published table by name; its module is imported when the table is asked for."""

from __future__ import annotations

from importlib import import_module

from laconic.errors import UsageError, did_you_mean, one_line
from laconic.simulator.reference.published import PublishedTable

_CLASSES: dict[str, str] = {
    "nccl": "nccl:Nccl",
    "deepep": "deepep:DeepEp",
    "diloco-utilization": "diloco_utilization:DilocoUtilization",
    "intellect-1": "intellect1:Intellect1",
    "splitwise": "splitwise:Splitwise",
    "serving": "serving:Serving",
    "vtrain": "vtrain:VTrain",
    "vtrain-single": "vtrain_single:VTrainSingle",
    "korthikanti": "korthikanti:Korthikanti",
    "torchtitan": "torchtitan:Torchtitan",
    "mpt-fsdp": "mpt_fsdp:MptFsdp",
    "zero3": "zero3:Zero3",
    "megatron-a100": "megatron_a100:MegatronA100",
    "megatron-h100": "megatron_h100:MegatronH100",
    "megascale": "megascale:MegaScale",
    "qwen3-moe": "qwen3_moe:Qwen3Moe",
    "switchml": "switchml:SwitchMl",
}
"""name -> module in this package, and the class in it."""


def table_names() -> list[str]:
    """Every name, in the order in which they are shown."""
    return list(_CLASSES)


def published_table(name: str) -> PublishedTable:
    """The table called `name`."""
    if name not in _CLASSES:
        raise UsageError(f'--reference: there is no table "{one_line(name, 40)}". {did_you_mean(name, _CLASSES)}')
    module, _, kind = _CLASSES[name].partition(":")
    made = getattr(import_module(f"laconic.simulator.reference.{module}"), kind)()
    assert isinstance(made, PublishedTable)
    assert made.name == name, f"{kind} is registered as {name} and calls itself {made.name}"
    return made
