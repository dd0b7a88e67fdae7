"""The memory model, against tensors that autograd really keeps and against what an optimizer holds."""

import collections
import itertools

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from dflop_ds.cost.features import MicrobatchFeatures, ProfileRow
from dflop_ds.cost.memory import MemoryModel, TrainingSetting
from dflop_ds.data.collate import PackedCollator
from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.data.demo import build_demo
from dflop_ds.data.demo_model import TinyModelDims
from dflop_ds.data.probe import probe
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.errors import CostModelError
from dflop_ds.flops import ModelDims
from dflop_ds.models.llava_onevision import pipeline_layers
from dflop_ds.profiling.harness import Bench, profile_layers
from dflop_ds.profiling.selection import choose_microbatches
from dflop_ds.profiling.timer import LayerTimer, SavedBytes
from dflop_ds.runtime.loss import packed_loss
from tests.support.live_bytes import LiveBytes


class Measured:
    """A profile of a small model and the bench to run its stages on."""

    def __init__(self, folder):
        dims = TinyModelDims(vision_hidden=64, vision_layers=3, text_hidden=96, text_layers=4)
        demo = build_demo(folder, num_samples=24, seed=1, dims=dims)
        dataset = from_pretrained_dir(demo.model_dir, demo.train_path, media_root=demo.media_root)
        found = probe(dataset, max_tokens=9000, progress=False)
        config = AutoConfig.from_pretrained(demo.model_dir)
        self.plans = pipeline_layers(config)
        self.table = found.table
        probed = ProbedDataset(dataset, found.table, found.rows)
        shape = dataset.processor.row_shape
        collate = PackedCollator(0, row_shape=shape, reduction="token", normalise="none")
        timer = LayerTimer(torch.device("cpu"), False, packed_loss)
        self.bench = Bench(probed, collate, timer, torch.float32)
        profile = profile_layers(
            self.plans,
            probed,
            choose_microbatches(found.table, 2, 10, 0),
            collate_fn=collate,
            loss_fn=packed_loss,
            device=timer.device,
            dtype=torch.float32,
        )
        self.dims = ModelDims.from_hf_config(config.to_dict())
        self.model = MemoryModel(profile.rows, profile.parameters, self.dims)
        kinds = [plan.kind for plan in self.plans]
        self.cut = 5
        self.stages = [kinds[: self.cut], kinds[self.cut :]]
        self.layers = [(plan, plan.build()) for plan in self.plans]

    def kept_bytes(self, stage, bins):
        """Bytes that autograd keeps while these microbatches are in flight."""
        layers = self.layers[: self.cut] if stage == 0 else self.layers[self.cut :]
        alive = []
        with SavedBytes([layer for _, layer in self.layers]) as saved:
            for members in bins:
                _, hidden, vector, labels = self.bench.inputs(members)
                for _, layer in self.layers[: self.cut] if stage == 1 else ():
                    with torch.no_grad():
                        hidden = layer((hidden, vector))[0]
                leaf = hidden.detach().requires_grad_(stage == 1)
                alive.append(self.bench.timer._forward(layers, leaf, vector, labels))
        return saved.total_bytes

    def peak_bytes(self, stage, bins, dtype, checkpointing):
        """Most bytes alive beyond weights, their gradients and what is handed in."""
        timer = LayerTimer(torch.device("cpu"), checkpointing, packed_loss)
        layers = [(plan, plan.build().to(dtype)) for plan in self.plans]
        own = layers[: self.cut] if stage == 0 else layers[self.cut :]
        parameters = [parameter for _, layer in own for parameter in layer.parameters()]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        given = [self._stage_inputs(layers, stage, members, dtype) for members in bins]
        existing = [tensor for inputs in given for tensor in (inputs[1], *inputs[2])]
        existing += [tensor for parameter in parameters for tensor in (parameter, parameter.grad)]
        alive = collections.deque()
        with LiveBytes(*existing) as live:
            for hidden, vector, labels in given:
                leaf = hidden.clone().requires_grad_(stage == 1)
                alive.append((leaf, timer._forward(own, leaf, vector, labels)[1]))
                del leaf
                if len(alive) == 2 - stage:
                    leaf, scored = alive.popleft()
                    scored.backward(torch.ones_like(scored))
                    del leaf, scored
        return live.peak_bytes

    def _stage_inputs(self, layers, stage, members, dtype):
        _, hidden, vector, labels = self.bench.inputs(members)
        hidden = hidden.to(dtype)
        with torch.no_grad():
            for _, layer in layers[: self.cut] if stage == 1 else ():
                hidden = layer((hidden, vector))[0]
        return hidden, vector, labels


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return Measured(tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("stage", [0, 1])
def test_activations_in_flight_match_the_tensors_that_are_kept(measured, stage):
    rng = np.random.default_rng(2)
    bins = [rng.integers(len(measured.table), size=2).tolist() for _ in range(4)]
    features = MicrobatchFeatures.from_bins(measured.table, bins)
    predicted = measured.model.stage(measured.stages, stage, features, TrainingSetting())
    single = [measured.kept_bytes(stage, [members]) for members in bins]
    in_flight = [bins[i] for i in np.argsort(single)[::-1][: 2 - stage]]
    assert predicted.activations_bytes == pytest.approx(measured.kept_bytes(stage, in_flight), rel=0.12)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaks_match_the_tensors_that_are_alive(measured, stage, checkpointing, dtype):
    """A step of 1F1B on one stage, every live tensor counted: logits, recomputation and gradients too."""
    rng = np.random.default_rng(3)
    bins = [rng.integers(len(measured.table), size=2).tolist() for _ in range(4)]
    features = MicrobatchFeatures.from_bins(measured.table, bins)
    setting = TrainingSetting(value_bytes=dtype.itemsize, activation_checkpointing=checkpointing)
    predicted = measured.model.stage(measured.stages, stage, features, setting)
    lasting = predicted.parameters_bytes + predicted.gradients_bytes + predicted.optimizer_bytes
    passing = predicted.total_bytes - lasting - predicted.communication_bytes
    assert passing == pytest.approx(measured.peak_bytes(stage, bins, dtype, checkpointing), rel=0.12)


def test_layer_bytes_match_on_other_shapes(measured):
    members = [[5, 6, 7]]
    features = MicrobatchFeatures.from_bins(measured.table, members)
    _, hidden, vector, labels = measured.bench.inputs(members[0])
    for built in measured.layers[:1] + measured.layers[1:2]:
        kept = measured.bench.timer.activation_bytes(built, hidden, vector, labels)
        predicted = measured.model.activation_bytes(built[0].kind, features)[0]
        assert predicted == pytest.approx(kept, rel=0.03)
        with torch.no_grad():
            hidden = built[1]((hidden, vector))[0]


def test_weights_gradients_and_optimizer_state(measured):
    layers = torch.nn.ModuleList(layer for _, layer in measured.layers[: measured.cut])
    optimizer = torch.optim.AdamW(layers.parameters())
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = sum(p.numel() * p.element_size() for p in layers.parameters())
    state = sum(
        value.numel() * value.element_size()
        for entry in optimizer.state.values()
        for value in entry.values()
        if value.dim()
    )
    features = MicrobatchFeatures.from_bins(measured.table, [[0]])
    predicted = measured.model.stage(measured.stages, 0, features, TrainingSetting())
    assert predicted.parameters_bytes == weights
    assert predicted.gradients_bytes == weights
    assert predicted.optimizer_bytes == state


def test_zero_1_divides_the_optimizer_state(measured):
    features = MicrobatchFeatures.from_bins(measured.table, [[0]])
    plain = measured.model.stage(measured.stages, 1, features, TrainingSetting(value_bytes=2))
    split = measured.model.stage(
        measured.stages, 1, features, TrainingSetting(value_bytes=2, zero_stage=1, data_parallel_size=4)
    )
    assert plain.optimizer_bytes == 6 * plain.parameters_bytes
    assert split.optimizer_bytes == plain.optimizer_bytes / 4
    assert split.gradients_bytes == plain.gradients_bytes == 3 * plain.parameters_bytes


def test_checkpointing_keeps_inputs_and_one_layer(measured):
    bins = [[0, 1], [2, 3], [4, 5]]
    features = MicrobatchFeatures.from_bins(measured.table, bins)
    plain = measured.model.stage(measured.stages, 0, features, TrainingSetting())
    light = measured.model.stage(measured.stages, 0, features, TrainingSetting(activation_checkpointing=True))
    assert light.activations_bytes < plain.activations_bytes / 3
    assert light.recompute_bytes > 0
    assert light.total_bytes < plain.total_bytes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_is_that_of_the_worst_order(measured, checkpointing):
    """Backward of each microbatch, with each other one in flight beside it, tried one after another."""
    stages = [["vision_embed", "vision_block"], ["projector"], ["token_embed", "norm", "head"]]
    features = MicrobatchFeatures.from_bins(measured.table, [[0, 1], [2], [3, 4, 5], [6], [7]])
    setting = TrainingSetting(activation_checkpointing=checkpointing)
    model = measured.model
    block = model.activation_bytes("vision_block", features)
    embed = model.activation_bytes("vision_embed", features)
    widest = np.maximum(embed, block)
    kept = sum(model.input_bytes(k, features, 4) for k in stages[0]) if checkpointing else embed + block
    running = widest * (1.5 if checkpointing else 0.5)
    expected = max(
        kept[list(trio)].sum() + running[trio[0]] for trio in itertools.permutations(range(len(features)), 3)
    )
    found = model.stage(stages, 0, features, setting)
    assert found.activations_bytes + found.recompute_bytes + found.backward_bytes == pytest.approx(expected)


def test_the_last_stage_holds_logits_and_one_microbatch(measured):
    features = MicrobatchFeatures.from_bins(measured.table, [[0], [1], [2]])
    first = measured.model.stage(measured.stages, 0, features, TrainingSetting())
    last = measured.model.stage(measured.stages, 1, features, TrainingSetting())
    assert first.logits_bytes == 0
    singles = [
        measured.model.stage(
            measured.stages, 1, MicrobatchFeatures.from_bins(measured.table, [[k]]), TrainingSetting()
        )
        for k in range(3)
    ]
    for single, target_tokens in zip(singles, features.target_tokens, strict=True):
        assert single.logits_bytes == target_tokens * measured.dims.llm.vocab * 8
    worst = max(singles, key=lambda each: each.total_bytes - each.communication_bytes)
    assert last.logits_bytes == worst.logits_bytes
    assert last.activations_bytes == worst.activations_bytes
    assert measured.stages[1][0] == "token_embed", "media tokens enter the last stage"
    tokens = features.media_tokens * measured.dims.llm.hidden * 4
    assert last.communication_bytes == np.sort(tokens)[-2:].sum(), "two buffers of received media tokens"
    pixels = features.encoder_inputs * 3 * measured.dims.vision.tile_px**2 * 4
    assert first.communication_bytes == np.sort(pixels)[-2:].sum() + tokens.max()


def test_rows_without_bytes_are_refused(measured):
    row = ProfileRow("norm", 0, 0, 10, 100, 1, 5, 1e-4, 1e-4)
    with pytest.raises(CostModelError, match="must have activation bytes"):
        MemoryModel([row], {"norm": 96}, measured.dims)


def test_no_microbatch_is_refused(measured):
    nothing = MicrobatchFeatures.from_bins(measured.table, [])
    with pytest.raises(CostModelError, match="at least one microbatch"):
        measured.model.stage(measured.stages, 0, nothing, TrainingSetting())


def test_zero_2_is_refused():
    with pytest.raises(CostModelError, match="ZeRO-0 and ZeRO-1 only"):
        TrainingSetting(zero_stage=2)
