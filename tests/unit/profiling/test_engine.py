"""The profiling engine: when a median is known, resuming, running out of memory, saved bytes."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from dflop_ds.data.collate import PackedCollator
from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.data.demo import build_demo
from dflop_ds.data.demo_model import TinyModelDims
from dflop_ds.data.probe import probe
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.models.llava_onevision import Projector, pipeline_layers
from dflop_ds.profiling.harness import is_out_of_memory, profile_layers
from dflop_ds.profiling.timer import SavedBytes, median_is_known
from dflop_ds.runtime.loss import packed_loss

KINDS = ["vision_embed", "vision_block", "projector", "token_embed", "decoder_block", "norm", "head"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    dims = TinyModelDims(vision_hidden=32, vision_layers=2, text_hidden=48, text_layers=2)
    demo = build_demo(tmp_path_factory.mktemp("demo"), num_samples=12, seed=3, dims=dims)
    dataset = from_pretrained_dir(demo.model_dir, demo.train_path, media_root=demo.media_root)
    found = probe(dataset, max_tokens=4096, progress=False)
    collate = PackedCollator(0, row_shape=dataset.processor.row_shape, reduction="token", normalise="none")
    plans = pipeline_layers(AutoConfig.from_pretrained(demo.model_dir))
    return plans, ProbedDataset(dataset, found.table, found.rows), collate


def measure(bench, microbatches, **options):
    plans, probed, collate = bench
    return profile_layers(
        plans,
        probed,
        microbatches,
        collate_fn=collate,
        loss_fn=packed_loss,
        device=torch.device("cpu"),
        dtype=torch.float32,
        **options,
    )


def test_a_median_is_known_when_repeats_agree():
    assert not median_is_known([1.0, 1.0])
    assert median_is_known([1.0, 1.01, 0.99])
    assert not median_is_known([1.0, 1.3, 0.8])
    assert median_is_known([1.0, 1.01, 0.99, 1.0, 40.0]), "one disturbed repeat"


def test_every_kind_is_measured(bench):
    heavy = int(bench[1].table.encoder_inputs.argmax())
    profile = measure(bench, [[heavy], [heavy, 0]])
    assert [row.kind for row in profile.rows] == KINDS * 2
    assert not profile.limits
    assert all(row.forward_s > 0 and row.activation_bytes > 0 for row in profile.rows)
    decoder = [row for row in profile.rows if row.kind == "decoder_block"]
    assert decoder[1].activation_bytes > decoder[0].activation_bytes
    layer = bench[0][KINDS.index("vision_block")].build()
    assert profile.parameters["vision_block"] == sum(p.numel() for p in layer.parameters())


def test_an_interrupted_profile_goes_on(bench, tmp_path, monkeypatch):
    path = tmp_path / "profile.partial.jsonl"
    shapes = [[0], [1], [2]]
    first = measure(bench, shapes, partial=path, partial_key="a")
    lines = path.read_text().splitlines()
    damaged = b"\xff\xfe\n" + b"[" * 10**5 + "\n".join(["", *lines[:3], lines[3][:40]]).encode()
    path.write_bytes(damaged)  # as if killed while writing the third, after other damage
    again = measure(bench, shapes, partial=path, partial_key="a")
    count = sum(1 for row in first.rows if row.kind == "norm")
    assert [row for row in again.rows if row.kind == "norm"][: count - 1] == [
        row for row in first.rows if row.kind == "norm"
    ][: count - 1]
    other = measure(bench, shapes, partial=path, partial_key="b")
    assert other.rows[-1] not in first.rows, "measured under other conditions"


def test_running_out_of_memory_is_a_limit(bench, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Projector, "forward", fail)
    heavy = int(bench[1].table.encoder_inputs.argmax())
    profile = measure(bench, [[heavy]])
    assert [limit.kind for limit in profile.limits] == ["projector"]
    assert profile.limits[0].encoder_inputs == bench[1].table.encoder_inputs[heavy]
    assert [row.kind for row in profile.rows] == ["vision_embed", "vision_block"]


def test_other_errors_are_not_limits(bench, monkeypatch):
    def fail(*_):
        raise RuntimeError("wrong shape")

    monkeypatch.setattr(Projector, "forward", fail)
    with pytest.raises(RuntimeError, match="wrong shape"):
        measure(bench, [[int(bench[1].table.encoder_inputs.argmax())]])


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"))
    assert not is_out_of_memory(RuntimeError("size mismatch"))


def test_saved_bytes_count_each_tensor_once_and_no_parameters():
    layer = nn.Linear(4, 8)
    value = torch.randn(3, 4, requires_grad=True)
    with SavedBytes([layer]) as saved:
        hidden = layer(value)
        hidden.exp() + hidden.sin()
    # Linear saves its input; exp saves its output, sin its input.
    assert saved.total_bytes == 4 * (value.numel() + 2 * hidden.numel())
    assert math.prod(layer.weight.shape) not in (saved.total_bytes,)
