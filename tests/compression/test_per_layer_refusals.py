"""Settings of per_layer that would have no effect are refused: when it is built, or when the model is known."""

from __future__ import annotations

import pytest

from laconic.compression import Int8, PerLayer
from laconic.core.optimizer_facts import OptimizerFacts
from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError, InvalidSetting

SGD = OptimizerFacts(name="SGD")
MODEL = [TensorSpec("block.weight", (96, 96)), TensorSpec("norm.weight", (96,)), TensorSpec("head.weight", (8, 96))]


def test_every_parameter_has_an_element() -> None:
    with pytest.raises(InvalidSetting, match=r"min_numel=1 has no effect.*Give at least 2, or leave it out"):
        PerLayer(Int8(), min_numel=1)


def test_what_is_skipped_for_its_shape_need_not_be_skipped_by_name() -> None:
    with pytest.raises(AttachError, match=r'skip="\*norm\*" has no effect on this model.*Leave skip out'):
        PerLayer(Int8(), skip="*norm*").check(MODEL, SGD)
    with pytest.raises(AttachError, match="has no effect on this model"):
        PerLayer(Int8(), skip="head*", min_numel=1000).check(MODEL, SGD)
    PerLayer(Int8(), skip="*norm*|head*").check(MODEL, SGD)
    PerLayer(Int8(), skip="*norm*", min_dims=0).check(MODEL, SGD)
