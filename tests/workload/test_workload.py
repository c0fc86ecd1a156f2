"""Jobs as data: what a document means, what is refused, and what follows from the layers."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.core.tensor import TensorSpec
from laconic.errors import UsageError
from laconic.workload import DTYPES, CodecCost, Layer, TensorShape, Workload, workload
from tests.simulator.jobs import job

EXAMPLE: dict[str, Any] = {
    "name": "example",
    "batch": 8,
    "source": "made up",
    "num_parameters": 29,
    "layers": [
        {
            "name": "first",
            "forward_s": 0.001,
            "backward_s": 0.002,
            "tensors": [{"name": "first.bias", "shape": [4]}, {"name": "first.weight", "shape": [4, 5]}],
        },
        {"name": "relu", "forward_s": 0, "backward_s": 1e-4},
        {"name": "last", "forward_s": 0.003, "backward_s": 0.004, "tensors": [{"name": "scale", "shape": [5]}]},
    ],
}


CODEC: dict[str, Any] = {
    "compressor": "int8",
    "encode_startup_s": 1e-5,
    "encode_byte_s": 2e-10,
    "decode_startup_s": 3e-5,
    "decode_byte_s": 4e-10,
    "source": "made up",
}


def changed(path: str, value: object) -> str:
    """The example with the value at `path` replaced, or removed if it is ..."""
    document: Any = copy.deepcopy(EXAMPLE)
    place = document
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document)


def test_what_a_document_means() -> None:
    job = Workload.from_json(json.dumps(EXAMPLE))
    assert (job.name, job.batch, job.source, job.dtype) == ("example", 8, "made up", torch.float32)
    assert [layer.name for layer in job.layers] == ["first", "relu", "last"]
    assert job.num_parameters == 29
    assert job.gradient_bytes == 4 * 29
    assert job.forward_s == pytest.approx(0.004)
    assert job.backward_s == pytest.approx(0.0061)
    assert job.compute_s == pytest.approx(0.0101)


def test_gradients_are_ready_last_layer_first_and_within_a_layer_as_listed() -> None:
    job = Workload.from_json(changed("dtype", "bfloat16"))
    assert job.tensors == (
        TensorSpec("scale", (5,), torch.bfloat16),
        TensorSpec("first.bias", (4,), torch.bfloat16),
        TensorSpec("first.weight", (4, 5), torch.bfloat16),
    )
    assert job.gradient_bytes == sum(tensor.nbytes for tensor in job.tensors) == 2 * 29


def test_what_compressors_cost() -> None:
    job = Workload.from_json(changed("codecs", [CODEC]))
    assert job.codecs == (CodecCost(**CODEC),)
    assert job.codecs[0].encode_s(1e6) == pytest.approx(1e-5 + 2e-4)
    assert job.codecs[0].decode_s(1e6) == pytest.approx(3e-5 + 4e-4)
    assert job.scaled(compute_s=1.0).codecs == job.codecs
    assert Workload.from_json(json.dumps(EXAMPLE)).codecs == ()


def test_what_no_order_of_exchanges_can_beat() -> None:
    three = job((1.0, 2.0, 400), (3.0, 4.0, 0), (0.5, 0.5, 4000))
    assert three.least_step_s(0.0) == 11.0
    assert three.least_step_s(0.001) == pytest.approx(11.4)  # the first layer's 400 bytes, hidden by nothing
    assert three.least_step_s(0.01) == pytest.approx(45.0)  # all 4400 bytes, and the last layer


def test_scaled_keeps_proportions_and_says_so() -> None:
    job = Workload.from_json(json.dumps(EXAMPLE))
    slow = job.scaled(compute_s=2.02)
    assert slow.compute_s == pytest.approx(2.02)
    for before, after in zip(job.layers, slow.layers, strict=True):
        assert after.forward_s == pytest.approx(200 * before.forward_s)
        assert after.backward_s == pytest.approx(200 * before.backward_s)
        assert (after.name, after.tensors) == (before.name, before.tensors)
    assert slow.source == "made up Times scaled to 2.02s of compute."
    assert slow.scaled(compute_s=0.5).source == "made up Times scaled to 500ms of compute."


@pytest.mark.parametrize("compute_s", [-1.0, math.nan, math.inf])
def test_scaled_refuses_what_is_no_time(compute_s: float) -> None:
    with pytest.raises(UsageError, match='workload "example": compute_s to scale to must be between 0 and'):
        Workload.from_json(json.dumps(EXAMPLE)).scaled(compute_s=compute_s)


def test_no_time_cannot_be_scaled() -> None:
    layer = Layer(name="only", forward_s=0.0, backward_s=0.0, tensors=(TensorShape(name="w", shape=(2,)),))
    with pytest.raises(UsageError, match="compute times"):
        Workload(name="idle", batch=1, layers=(layer,), source="made up").scaled(compute_s=1.0)


names = st.text(min_size=1, max_size=12).filter(str.strip)
times = st.floats(0, 3600, allow_nan=False)


bytes_s = st.floats(0, 1e-3, allow_nan=False)
codecs = st.builds(
    CodecCost,
    compressor=names,
    encode_startup_s=times,
    encode_byte_s=bytes_s,
    decode_startup_s=times,
    decode_byte_s=bytes_s,
    source=names,
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    layer_names = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    tensor_names = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    owners = [draw(st.integers(0, len(layer_names) - 1)) for _ in tensor_names]
    shapes = [tuple(draw(st.lists(st.integers(0, 50), max_size=4))) for _ in tensor_names]
    return Workload(
        name=draw(names),
        batch=draw(st.integers(1, 10**6)),
        layers=tuple(
            Layer(
                name=name,
                forward_s=draw(times),
                backward_s=draw(times),
                tensors=tuple(
                    TensorShape(name=tensor, shape=shape)
                    for tensor, shape, owner in zip(tensor_names, shapes, owners, strict=True)
                    if owner == index
                ),
            )
            for index, name in enumerate(layer_names)
        ),
        source=draw(names),
        dtype=draw(st.sampled_from(list(DTYPES.values()))),
        codecs=tuple(draw(st.lists(codecs, max_size=3, unique_by=lambda codec: codec.compressor))),
    )


@given(workloads())
def test_written_and_read_back_it_is_equal(job: Workload) -> None:
    again = Workload.from_json(job.to_json())
    assert again == job
    assert again.to_json() == job.to_json()


@given(workloads())
def test_sums_agree_with_the_tensors(job: Workload) -> None:
    assert job.num_parameters == sum(tensor.numel for tensor in job.tensors)
    assert job.gradient_bytes == sum(tensor.nbytes for tensor in job.tensors)
    assert job.compute_s == pytest.approx(sum(layer.forward_s + layer.backward_s for layer in job.layers))


FIRST = "layers/0/tensors/0"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "workload JSON cannot be read: Expecting property name"),
        ("[" * 100_000, "workload JSON cannot be read"),
        ('{"batch": ' + "9" * 5000 + "}", "workload JSON cannot be read"),
        ("3", "workload JSON must be an object {...}, got 3."),
        ('{"name": "a", "name": "b"}', 'the key "name" appears twice in one object'),
        (changed("batchsize", 3), 'there is no key "batchsize". Did you mean "batch"?'),
        (changed("layers/0/forward", 3), 'layers[0]: there is no key "forward". Did you mean "forward_s"?'),
        (changed(f"{FIRST}/size", 3), 'layers[0].tensors[0]: there is no key "size". Known: name, shape.'),
        (changed("source", ...), '"source" is missing. Needed: name, batch, source, layers.'),
        (changed("layers/1/backward_s", ...), 'layers[1]: "backward_s" is missing'),
        (changed(f"{FIRST}/shape", ...), 'layers[0].tensors[0]: "shape" is missing'),
        (changed("name", 3), "name must be text in quotes, got 3."),
        (changed("name", " "), "a workload's name must be text that is not empty, got ' '."),
        (changed("source", ""), "source is empty. Say in a sentence where"),
        (changed("batch", 0), 'workload "example": batch must be a whole number >= 1, got 0.'),
        (changed("batch", 2.5), "batch must be a whole number, got 2.5."),
        (changed("batch", True), "batch must be a whole number, got true."),
        (changed("dtype", "float23"), 'there is no dtype "float23". Did you mean "float32"?'),
        (changed("dtype", ["float32"]), "there is no dtype"),
        (changed("num_parameters", 30), "num_parameters says 30, but the shapes add up to 29."),
        (changed("num_parameters", 29.0), "num_parameters must be a whole number, got 29.0."),
        (changed("layers", {}), 'layers must be a list of objects {"name": ..., "forward_s"'),
        (changed("layers", []), "has no tensor, so there is nothing to exchange"),
        (changed("layers/2", "last"), 'layers[2] must be an object {...}, got "last".'),
        (changed("layers/1/name", "last"), 'two layers are called "last"'),
        (changed("layers/0/name", ""), "a layer's name must be text that is not empty"),
        (
            changed("layers/0/forward_s", -0.1),
            'layer "first": forward_s must be between 0 and 86400 seconds, got -0.1.',
        ),
        (changed("layers/0/forward_s", math.nan), "got nan"),
        (changed("layers/0/backward_s", math.inf), "got inf"),
        (changed("layers/0/backward_s", 10**400), "got inf"),
        (changed("layers/0/backward_s", 90_000), "got 90000.0. Times are in seconds."),
        (
            changed("layers/0/backward_s", "2ms"),
            'layers[0].backward_s must be a time in seconds such as 0.002, got "2ms"',
        ),
        (changed("layers/0/backward_s", False), "must be a time in seconds"),
        (
            changed("layers/0/tensors", "first.weight"),
            'tensors must be a list of objects {"name": ..., "shape": [...]}',
        ),
        (changed(f"{FIRST}/name", "scale"), 'two tensors are called "scale"'),
        (changed(f"{FIRST}/name", ""), "a tensor's name must be text that is not empty"),
        (changed(f"{FIRST}/shape", 4), "shape must be a list of whole numbers such as [64, 3, 7, 7], got 4."),
        (changed(f"{FIRST}/shape", [4.5]), "shape[0] must be a whole number, got 4.5."),
        (
            changed(f"{FIRST}/shape", [-4]),
            'tensor "first.bias": every entry of shape must be a whole number >= 0, got -4.',
        ),
        (changed(f"{FIRST}/shape", [2**40, 2**40]), "shape must give at most"),
        (
            changed("codecs", {}),
            'codecs must be a list of objects {"compressor": ..., "encode_startup_s": ...}, got {}.',
        ),
        (changed("codecs", [CODEC, CODEC]), 'two codecs are called "int8". Keep one.'),
        (changed("codecs", [{**CODEC, "speed": 1}]), 'codecs[0]: there is no key "speed".'),
        (changed("codecs", [{"compressor": "int8"}]), 'codecs[0]: "encode_startup_s" is missing.'),
        (changed("codecs", [{**CODEC, "compressor": 8}]), "codecs[0].compressor must be text in quotes, got 8."),
        (changed("codecs", [{**CODEC, "compressor": ""}]), "a codec's compressor must be text that is not empty"),
        (changed("codecs", [{**CODEC, "source": " "}]), 'codec "int8": source is empty.'),
        (
            changed("codecs", [{**CODEC, "encode_byte_s": 0.5}]),
            'codec "int8": encode_byte_s must be between 0 and 0.001 seconds, got 0.5.',
        ),
        (changed("codecs", [{**CODEC, "decode_startup_s": math.nan}]), "decode_startup_s must be between 0 and 86400"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Workload.from_json(text)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dtype_that_is_no_gradient_is_refused() -> None:
    layer = Layer(name="only", forward_s=0.0, backward_s=0.0, tensors=(TensorShape(name="w", shape=(2,)),))
    with pytest.raises(UsageError, match=r"dtype must be one of float32, .*, got torch.int64"):
        Workload(name="whole", batch=1, layers=(layer,), source="made up", dtype=torch.int64)


PATHS = ["name", "batch", "dtype", "source", "layers", "layers/1", "layers/1/name", "layers/0/forward_s"]
PATHS += ["codecs", "layers/0/tensors", FIRST, f"{FIRST}/name", f"{FIRST}/shape", f"{FIRST}/shape/0", "num_parameters"]
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(PATHS), junk)
def test_any_document_is_read_or_refused(path: str, value: object) -> None:
    with contextlib.suppress(UsageError):
        job = Workload.from_json(changed(path, value))
        assert Workload.from_json(job.to_json()) == job


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(EXAMPLE), encoding="utf-8")
    assert workload(str(path)) == workload(path) == Workload.load(path) == Workload.from_json(json.dumps(EXAMPLE))


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match=r'job\.json: workload JSON: "name" is missing'):
        workload(path)
    path.write_bytes(b"\xff\xff")
    with pytest.raises(UsageError, match=r"cannot read the workload file .*: not UTF-8 text"):
        workload(path)
    with pytest.raises(UsageError, match=r"cannot read the workload file .*none\.json: No such file"):
        workload(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot read the workload file"):
        workload("\0.json")


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(UsageError, match=r'no workload "resnet5". Did you mean "resnet50"\? Known: .*Or give a \.json'):
        workload("resnet5")
