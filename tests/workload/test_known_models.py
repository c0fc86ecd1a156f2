"""The known models: their published sizes, their order, their times, and what the documentation says of them."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from laconic.workload import WORKLOADS, Workload, workload
from laconic.workload.profiler import Subject, profile

PAGE = Path(__file__).resolve().parents[2] / "docs" / "workloads.md"
SIZES = {
    "resnet50": (25_557_032, 161, 64, 64 / 253.1),
    "vgg16": (138_357_544, 32, 64, 0.0455),
    "bert-base": (110_111_042, 206, 64, 64 / 212.8),
    "bert-large": (336_232_258, 398, 8, 8 / 49),
    "gpt2": (124_439_808, 148, 16, 0.0770),
    "gpt2-xl": (1_557_611_200, 580, 8, 0.2308),
    "llama-7b": (6_738_415_616, 291, 4, 0.6307),
    # Not measured; see below.
    "llama-70b": (68_976_648_192, 723, 4, None),
}
BFLOAT16 = ("llama-7b", "llama-70b")


@pytest.mark.parametrize("name", WORKLOADS)
def test_sizes(name: str) -> None:
    job = workload(name)
    num_parameters, num_tensors, batch, compute_s = SIZES[name]
    assert (job.name, job.batch) == (name, batch)
    assert job.num_parameters == num_parameters
    assert len(job.tensors) == num_tensors
    assert job.gradient_bytes == (2 if name in BFLOAT16 else 4) * num_parameters
    assert job.dtype == (torch.bfloat16 if name in BFLOAT16 else torch.float32)
    if compute_s is not None:
        assert job.compute_s == pytest.approx(compute_s)
    assert job.compute_s == pytest.approx(sum(layer.forward_s + layer.backward_s for layer in job.layers))


def test_a_time_that_is_stated_is_that_of_the_operations() -> None:
    job = workload("llama-70b")
    assert "not measured" in job.source
    # Three times (forward, and twice that backward) two operations for each weight and token, where the embedding is
    # only looked up; and for each block, scores and mixtures of 2048 by 2048 tokens.
    weights = job.num_parameters - 32_000 * 8192
    tokens = 4 * 2048
    operations = 6 * weights * tokens + 3 * 80 * 2 * 2 * tokens * 2048 * 8192
    at_least_s = operations / (0.61 * 989.4e12)
    # Operations other than products only read and write: a few per cent more.
    assert at_least_s < job.compute_s < 1.06 * at_least_s


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_layer_takes_time_and_backward_twice_as_much(name: str) -> None:
    job = workload(name)
    for layer in job.layers:
        assert layer.forward_s > 0
        assert layer.backward_s == pytest.approx(2 * layer.forward_s)


@pytest.mark.parametrize("name", WORKLOADS)
def test_json_round_trip(name: str) -> None:
    job = workload(name)
    assert Workload.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("resnet50", ["fc.bias", "fc.weight", "layer4.2.bn3.weight"], ["bn1.weight", "bn1.bias", "conv1.weight"]),
        (
            "bert-base",
            ["cls.seq_relationship.bias", "cls.seq_relationship.weight", "cls.predictions.bias"],
            [f"bert.embeddings.{table}_embeddings.weight" for table in ("token_type", "position", "word")],
        ),
        (
            "gpt2",
            ["transformer.ln_f.weight", "transformer.ln_f.bias", "transformer.h.11.mlp.c_proj.bias"],
            ["transformer.h.0.ln_1.bias", "transformer.wpe.weight", "transformer.wte.weight"],
        ),
        (
            "gpt2-xl",
            ["transformer.ln_f.weight", "transformer.ln_f.bias", "transformer.h.47.mlp.c_proj.weight"],
            ["transformer.h.0.ln_1.bias", "transformer.wpe.weight", "transformer.wte.weight"],
        ),
        (
            "vgg16",
            ["classifier.6.bias", "classifier.6.weight", "classifier.3.bias"],
            ["features.2.bias", "features.0.weight", "features.0.bias"],
        ),
        (
            "llama-7b",
            ["lm_head.weight", "model.norm.weight", "model.layers.31.mlp.down_proj.weight"],
            [
                "model.layers.0.self_attn.q_proj.weight",
                "model.layers.0.input_layernorm.weight",
                "model.embed_tokens.weight",
            ],
        ),
    ],
)
def test_order(name: str, first: list[str], last: list[str]) -> None:
    names = [tensor.name for tensor in workload(name).tensors]
    assert names[:3] == first
    assert names[-3:] == last


def test_shapes_are_those_of_the_models() -> None:
    resnet = {tensor.name: tensor.shape for tensor in workload("resnet50").tensors}
    assert resnet["conv1.weight"] == (64, 3, 7, 7)
    assert resnet["layer2.0.downsample.0.weight"] == (512, 256, 1, 1)
    assert resnet["layer4.2.conv2.weight"] == (512, 512, 3, 3)
    assert resnet["fc.weight"] == (1000, 2048)
    bert = {tensor.name: tensor.shape for tensor in workload("bert-large").tensors}
    assert bert["bert.encoder.layer.23.intermediate.dense.weight"] == (4096, 1024)
    assert bert["bert.embeddings.word_embeddings.weight"] == (30528, 1024)
    gpt2 = {tensor.name: tensor.shape for tensor in workload("gpt2").tensors}
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == (768, 2304)
    large = {tensor.name: tensor.shape for tensor in workload("gpt2-xl").tensors}
    assert large["transformer.h.47.mlp.c_fc.weight"] == (1600, 6400)
    assert large["transformer.wpe.weight"] == (1024, 1600)
    vgg = {tensor.name: tensor.shape for tensor in workload("vgg16").tensors}
    assert vgg["features.28.weight"] == (512, 512, 3, 3)
    assert vgg["classifier.0.weight"] == (4096, 25088)
    llama = {tensor.name: tensor.shape for tensor in workload("llama-70b").tensors}
    assert llama["model.layers.79.self_attn.q_proj.weight"] == (8192, 8192)
    assert llama["model.layers.79.self_attn.k_proj.weight"] == (1024, 8192)
    assert llama["model.layers.79.mlp.down_proj.weight"] == (8192, 28672)
    assert llama["lm_head.weight"] == llama["model.embed_tokens.weight"] == (32000, 8192)


def test_the_order_of_vgg16_is_the_one_autograd_has() -> None:
    """The same modules with fewer channels: names and order do not depend on them."""
    layers: list[nn.Module] = []
    channels = 3
    for convolutions in (2, 2, 3, 3, 3):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(inplace=True)]
            channels = 4
        layers.append(nn.MaxPool2d(2))
    linear = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout()]
    parts = {"features": nn.Sequential(*layers), "flatten": nn.Flatten()}
    parts["classifier"] = nn.Sequential(*linear, nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 2))
    model = nn.Sequential(OrderedDict(parts))
    subject = Subject(model=model, batch=torch.randn(2, 3, 32, 32), loss=lambda model, batch: model(batch).sum())
    seen = profile(subject, name="vgg", device="cpu", steps=1).workload
    known = workload("vgg16")
    assert [tensor.name for tensor in seen.tensors] == [tensor.name for tensor in known.tensors]
    names = [layer.name for layer in seen.layers]
    names.remove("flatten")
    assert names == [layer.name for layer in known.layers]


def test_times_follow_the_work() -> None:
    times_s = {layer.name: layer.forward_s for layer in workload("bert-base").layers}
    query_s = times_s["bert.encoder.layer.0.attention.self.query"]
    # Four times the operations of a square matrix, and 30528 / 768 times.
    assert times_s["bert.encoder.layer.0.intermediate.dense"] == pytest.approx(4 * query_s)
    assert times_s["cls.predictions.decoder"] == pytest.approx(30528 / 768 * query_s)
    assert times_s["cls.seq_relationship"] < query_s / 100
    resnet = {layer.name: layer.forward_s for layer in workload("resnet50").layers}
    # 3 x 3 against 1 x 1, at a quarter of the output channels.
    assert resnet["layer4.1.conv2"] == pytest.approx(9 / 4 * resnet["layer4.1.conv3"])


def test_the_page_shows_a_document_that_can_be_read() -> None:
    found = re.search(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    job = Workload.from_json(found[1])
    assert job.num_parameters > 0
    assert len(job.codecs) == 1
    assert any(not layer.tensors for layer in job.layers)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_page_says_what_the_known_models_are(name: str) -> None:
    job = workload(name)
    row = f"| `{name}` | {job.num_parameters:,} | {len(job.tensors)} | {job.gradient_bytes / 1e6:.1f} MB "
    row += f"| {job.batch} | {job.forward_s * 1e3:.1f} ms | {job.backward_s * 1e3:.1f} ms |"
    page = PAGE.read_text(encoding="utf-8")
    assert row in page
    assert " ".join(job.source.split()) in " ".join(page.split())
