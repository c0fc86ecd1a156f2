"""Imported once by the process that workers are forked from: loads the libraries and compiles the kernels they need."""

from __future__ import annotations

import torch

from benchmarks.elastic.families import FAMILIES
from benchmarks.elastic.worker import make_model
from laconic.runtime.attach import trainable_parameters
from laconic.runtime.elastic.warm_up import warm_up
from laconic.strategy import Strategy

torch.set_num_threads(1)
_MODEL, _ = make_model()
for _family in FAMILIES.values():
    warm_up(Strategy.parse(_family), _MODEL, trainable_parameters(_MODEL))
