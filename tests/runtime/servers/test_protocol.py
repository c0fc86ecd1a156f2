"""Notes that come from a network: what is written can be read, and nothing else does harm."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import CommunicationError
from laconic.runtime.servers.protocol import OPTIMIZERS, Configuration, group_settings, read_note, whole, wholes

NAMES = st.text(min_size=1, max_size=12)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
NUMBERS = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8)
JSON = st.recursive(
    NUMBERS | st.floats(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    shapes = st.lists(st.integers(0, 50), max_size=3).map(tuple)
    buckets = {
        draw(st.integers(index * 10, index * 10 + 9)): Bucket((TensorSpec(name, draw(shapes), draw(DTYPES)),))
        for index, name in enumerate(names)
    }
    optimizer = draw(st.sampled_from(["", *OPTIMIZERS]))
    groups = draw(st.lists(st.dictionaries(NAMES.filter(lambda name: name != "params"), NUMBERS, max_size=4)))
    return Configuration(
        draw(st.text(max_size=20)),
        draw(st.integers(1, 1000)),
        draw(st.integers(0, 1000)),
        buckets,
        optimizer,
        tuple(groups) if optimizer else (),
        tuple((name, draw(st.integers(-1, len(groups) - 1))) for name in names) if optimizer else (),
        draw(st.floats(0.001, 1e6)),
    )


@settings(max_examples=40)
@given(configurations())
def test_what_is_written_can_be_read(about: Configuration) -> None:
    assert Configuration.read(about.write()) == about


@settings(max_examples=40)
@given(JSON)
def test_any_other_document_is_refused_in_words(document: object) -> None:
    with pytest.raises(CommunicationError):
        Configuration.read(json.dumps(document))


@settings(max_examples=40)
@given(configurations(), st.data())
def test_a_damaged_configuration_is_refused_or_still_makes_sense(about: Configuration, data: st.DataObject) -> None:
    document = json.loads(about.write())
    key = data.draw(st.sampled_from(sorted(document)))
    if data.draw(st.booleans()):
        del document[key]
    else:
        document[key] = data.draw(JSON)
    try:
        found = Configuration.read(json.dumps(document))
    except CommunicationError:
        return
    assert 1 <= found.world_size <= 2**16
    assert all(tensor.numel >= 0 for bucket in found.buckets.values() for tensor in bucket.tensors)


@settings(max_examples=40)
@given(st.text(max_size=60))
def test_a_note_is_a_table_or_refused(text: str) -> None:
    with contextlib.suppress(CommunicationError):
        assert isinstance(read_note(text), dict)


def test_notes_nested_beyond_reason_are_refused() -> None:
    with pytest.raises(CommunicationError, match="not JSON"):
        read_note("[" * 200_000)


@settings(max_examples=40)
@given(JSON)
def test_fields_of_notes_are_what_they_must_be(value: object) -> None:
    document = {"step": value, "unused": value}
    with contextlib.suppress(CommunicationError):
        assert type(whole(document, "step", at_most=9)) is int
        assert 0 <= document["step"] <= 9
    with contextlib.suppress(CommunicationError):
        assert all(type(entry) is int for entry in wholes(document, "unused"))


def test_settings_of_a_group_travel_as_numbers() -> None:
    group = {"params": [1], "lr": torch.tensor(0.25), "betas": (torch.tensor(0.5), 0.75), "fused": None}
    assert group_settings(group) == {"lr": 0.25, "betas": (0.5, 0.75), "fused": None}
    with pytest.raises(CommunicationError, match='the optimizer has a Tensor as "lr"'):
        group_settings({"lr": torch.ones(2)})
    with pytest.raises(CommunicationError, match='a tuple as "betas"'):
        group_settings({"betas": [torch.ones(2)]})
