"""Every private or undocumented DeepSpeed name that ``runtime/compat.py`` relies on."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import constants
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.utils.tensor_fragment import tensor_fragment

import dflop_ds
from dflop_ds.runtime import compat
from dflop_ds.runtime.engine import DflopPipelineEngine
from dflop_ds.runtime.module import DflopPipelineModule


def _names(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _mentions(source: str, name: str) -> bool:
    return f"'{name}'" in source or f'"{name}"' in source


@pytest.mark.parametrize("method", compat.ENGINE_METHODS)
def test_engine_methods(method: str) -> None:
    expected = compat.ENGINE_METHODS[method]
    assert _names(getattr(PipelineEngine, method))[: len(expected)] == expected


@pytest.mark.parametrize("method", compat.MODULE_METHODS)
def test_module_methods(method: str) -> None:
    expected = compat.MODULE_METHODS[method]
    assert _names(getattr(PipelineModule, method))[: len(expected)] == expected


def _overridden(child: type, parent: type) -> set[str]:
    own = {name for name, value in vars(child).items() if inspect.isfunction(value)}
    return {name for name in own if hasattr(parent, name)}


def test_every_overridden_method_is_listed_or_public() -> None:
    """An override of a private method that is not in the list would not be checked."""
    private = {name for name in _overridden(DflopPipelineEngine, PipelineEngine) if name.startswith("_")}
    assert private - {"__init__"} <= set(compat.ENGINE_METHODS)
    private = {name for name in _overridden(DflopPipelineModule, PipelineModule) if name.startswith("_")}
    assert private - {"__init__"} <= set(compat.MODULE_METHODS)


@pytest.mark.parametrize(
    ("child", "parent"), [(DflopPipelineEngine, PipelineEngine), (DflopPipelineModule, PipelineModule)]
)
def test_overrides_take_the_parameters_of_the_base(child: type, parent: type) -> None:
    for name in _overridden(child, parent) - {"__init__"}:
        base = _names(getattr(parent, name))
        mine = _names(getattr(child, name))
        required = [
            key
            for key, parameter in inspect.signature(getattr(parent, name)).parameters.items()
            if parameter.default is parameter.empty
        ]
        assert mine[: len(required)] == tuple(required) == base[: len(required)], name


@pytest.mark.parametrize("key", compat.PIPE_BUFFERS)
def test_pipe_buffers(key: str) -> None:
    source = inspect.getsource(PipelineEngine)
    assert "self.pipe_buffers" in source
    assert _mentions(source, key)


@pytest.mark.parametrize(
    "attribute",
    [
        "micro_batches",
        "grad_layer",
        "using_bf16_optimizer",
        "is_pipe_partitioned",
        "pipe_buffers",
        "grid",
        "data_iterator",
    ],
)
def test_attributes_that_the_engine_sets(attribute: str) -> None:
    assert f"self.{attribute} =" in inspect.getsource(PipelineEngine)


@pytest.mark.parametrize(
    "attribute", ["collate_fn", "tput_timer", "local_rank", "global_rank", "dp_world_size"]
)
def test_attributes_that_the_base_engine_sets(attribute: str) -> None:
    assert f"self.{attribute} =" in inspect.getsource(DeepSpeedEngine)


def test_training_data_pass_through_the_overridden_method() -> None:
    assert "self._build_data_iter(self.training_data)" in inspect.getsource(PipelineEngine.__init__)


@pytest.mark.parametrize(
    "make",
    [
        lambda stages, stage: schedule.TrainSchedule(micro_batches=5, stages=stages, stage_id=stage),
        lambda stages, stage: schedule.InferenceSchedule(micro_batches=5, stages=stages, stage_id=stage),
    ],
    ids=["train", "inference"],
)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_map_covers_every_instruction_of_the_schedules(make, num_stages: int) -> None:
    issued = {
        type(command) for stage in range(num_stages) for step in make(num_stages, stage) for command in step
    }
    assert {schedule.LoadMicroBatch, schedule.ForwardPass} <= issued
    assert issued <= set(compat.instruction_map(PipelineEngine))
    assert issued <= set(DflopPipelineEngine._INSTRUCTION_MAP)


def test_deepspeed_dispatches_through_the_map() -> None:
    source = inspect.getsource(PipelineEngine._exec_schedule)
    assert f"self.{compat.INSTRUCTION_MAP_ATTRIBUTE}[" in source, "a map on the instance is seen"


def test_our_map_holds_our_overrides_and_else_the_functions_of_the_base() -> None:
    base, ours = PipelineEngine._INSTRUCTION_MAP, DflopPipelineEngine._INSTRUCTION_MAP
    overridden = {
        schedule.LoadMicroBatch: "_exec_load_micro_batch",
        schedule.ForwardPass: "_exec_forward_pass",
        schedule.BackwardPass: "_exec_backward_pass",
        schedule.ReduceGrads: "_exec_reduce_grads",
        schedule.RecvActivation: "_exec_recv_activations",
        schedule.SendGrad: "_exec_send_grads",
        schedule.RecvGrad: "_exec_recv_grads",
    }
    assert ours.keys() == base.keys()
    for instruction, function in ours.items():
        if instruction in overridden:
            assert function is vars(DflopPipelineEngine)[overridden[instruction]]
            assert function is not base[instruction]
        else:
            assert function is base[instruction]


def test_the_map_of_the_base_is_untouched() -> None:
    for function in PipelineEngine._INSTRUCTION_MAP.values():
        assert function is vars(PipelineEngine)[function.__name__]
    copy = compat.instruction_map(PipelineEngine)
    copy.clear()
    assert PipelineEngine._INSTRUCTION_MAP


def test_instructions_have_the_keyword_arguments_that_we_override_with() -> None:
    for kind in (schedule.LoadMicroBatch, schedule.ForwardPass, schedule.BackwardPass):
        assert kind(3).kwargs == {"buffer_id": 3}
    assert schedule.ReduceGrads().kwargs == {}


def test_configuration_class() -> None:
    assert _names(DeepSpeedConfig.__init__)[:3] == ("self", "config", "mpu")


def test_engine_takes_what_make_engine_passes() -> None:
    names = _names(DeepSpeedEngine.__init__)
    passed = {
        "args",
        "model",
        "optimizer",
        "model_parameters",
        "training_data",
        "lr_scheduler",
        "mpu",
        "dist_init_required",
        "collate_fn",
        "config",
        "config_class",
    }
    assert passed <= set(names)
    kinds = {parameter.kind for parameter in inspect.signature(PipelineEngine.__init__).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds


def test_make_engine_follows_deepspeed_initialize() -> None:
    source = inspect.getsource(deepspeed.initialize)
    assert "mpu = model.mpu()" in source
    assert "DeepSpeedConfig(config, mpu)" in source
    for name in ("set_optimizer_flags", "_configure_python_gc"):
        known = hasattr(deepspeed, name) or hasattr(DeepSpeedEngine, name)
        assert (name in source) == known, f"{name} is called exactly where it exists"


def test_bf16_optimizer() -> None:
    assert callable(BF16_Optimizer.clear_lp_grads)
    assert "clear_lp_grads" in _names(BF16_Optimizer.update_hp_grads)
    source = inspect.getsource(PipelineEngine._exec_backward_pass)
    assert "self.optimizer.clear_lp_grads()" in source
    assert "self.optimizer.update_hp_grads(clear_lp_grads=False)" in source
    assert "self._config.bfloat16_config.immediate_grad_update" in source


def test_backward_is_announced_to_the_hooks_as_we_do() -> None:
    source = inspect.getsource(PipelineEngine._exec_backward_pass)
    assert "self._running_engine_backward = True" in source
    assert "self._running_engine_backward = False" in source


def test_buffers_are_released_as_we_do() -> None:
    source = inspect.getsource(PipelineEngine._exec_backward_pass)
    for key in ("output_tensors", "outputs"):
        assert f"self.pipe_buffers['{key}'][buffer_id] = None" in source.replace('"', "'")


def test_gradient_accumulation_attribute_of_zero_1() -> None:
    source = inspect.getsource(stage_1_and_2)
    assert "self.use_grad_accum_attribute = True" in source
    assert "self.gradient_accumulation_dtype = gradient_accumulation_dtype" in source
    assert "grad_accum" in source.replace("use_grad_accum_attribute", "")


def test_missing_gradients_are_filled_where_zero_1_looks_for_them() -> None:
    class Optimizer:
        use_grad_accum_attribute = True
        gradient_accumulation_dtype = torch.float32

    for optimizer, name, dtype in (
        (object(), "grad", torch.bfloat16),
        (Optimizer(), "grad_accum", torch.float32),
    ):
        module = torch.nn.Linear(2, 3).to(torch.bfloat16)
        module.bias.requires_grad_(False)
        engine = type("Engine", (), {"using_bf16_optimizer": False, "optimizer": optimizer, "module": module})
        compat.fill_missing_gradients(engine)
        filled = getattr(module.weight, name)
        assert (filled.shape, filled.dtype, filled.abs().sum().item()) == ((3, 2), dtype, 0.0)
        assert module.bias.grad is None
        setattr(module.weight, name, filled + 1)
        compat.fill_missing_gradients(engine)
        assert getattr(module.weight, name).abs().sum().item() == 6.0, "present gradients are kept"


def test_parameters_of_every_stage_count_in_the_gradient_norm() -> None:
    from deepspeed.runtime.utils import is_model_parallel_parameter

    module = torch.nn.Linear(2, 3)
    module.bias.ds_pipe_replicated = True
    assert not is_model_parallel_parameter(module.weight)
    compat.count_in_gradient_norm(module)
    assert is_model_parallel_parameter(module.weight)
    assert not is_model_parallel_parameter(module.bias), "tied: counted where it is owned"


def test_initialize_mirrors_deepspeed() -> None:
    theirs, ours = inspect.signature(deepspeed.initialize), inspect.signature(dflop_ds.initialize)
    assert list(ours.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert ours.parameters[name].default == parameter.default, name


def test_data_loader() -> None:
    passed = {
        "dataset",
        "batch_size",
        "pin_memory",
        "local_rank",
        "tput_timer",
        "collate_fn",
        "num_local_io_workers",
        "data_sampler",
    }
    assert passed <= set(_names(DeepSpeedDataLoader.__init__))
    assert "self._create_dataloader()" in inspect.getsource(DeepSpeedDataLoader.__iter__)
    assert "next(self.data)" in inspect.getsource(DeepSpeedDataLoader.__next__)


def test_layer_specs() -> None:
    assert _names(LayerSpec.__init__)[:2] == ("self", "typename")
    assert _names(LayerSpec.build) == ("self", "log")
    assert {"key", "typename", "forward_fn", "tied_weight_attr"} <= set(_names(TiedLayerSpec.__init__))


def test_pipeline_module_takes_what_the_module_passes() -> None:
    passed = {
        "layers",
        "num_stages",
        "loss_fn",
        "partition_method",
        "dynamic_shape",
        "activation_checkpoint_interval",
        "activation_checkpoint_func",
    }
    assert passed <= set(_names(PipelineModule.__init__))
    source = inspect.getsource(PipelineModule)
    for attribute in ("parts", "tied_modules", "_local_start", "_local_stop", "stage_id", "global_rank"):
        assert f"self.{attribute}" in source


def test_partitions_know_their_place() -> None:
    fields = {field.name for field in dataclasses.fields(tensor_fragment)}
    assert {"lp_fragment_address", "hp_fragment_address", "param_group_index"} <= fields
    for optimizer in (BF16_Optimizer, stage_1_and_2.DeepSpeedZeroOptimizer):
        source = inspect.getsource(optimizer)
        assert "dp_process_group" in source
        assert "_hp_mapping" in source
        assert callable(optimizer.refresh_fp32_params)
        for key in ("BASE_OPTIMIZER_STATE", "SINGLE_PARTITION_OF_FP32_GROUPS"):
            assert f"state_dict[{key}]" in source
    assert constants.OPTIMIZER_STATE_DICT == "optimizer_state_dict"
    assert constants.BASE_OPTIMIZER_STATE == "base_optimizer_state"
    assert constants.SINGLE_PARTITION_OF_FP32_GROUPS == "single_partition_of_fp32_groups"


def test_a_layer_has_a_file_of_its_own() -> None:
    source = inspect.getsource(PipelineModule.ckpt_layer_path)
    assert "layer_{idx:02d}" in source
    assert "model_states.pt" in source


def test_checkpoints_are_written_at_once_by_default() -> None:
    assert TorchCheckpointEngine().is_decoupled() is False


def test_checkpoints_are_written_by_the_writer_of_the_engine() -> None:
    assert list(inspect.signature(TorchCheckpointEngine.save).parameters) == ["self", "state_dict", "path"]
    assert "self.checkpoint_engine =" in inspect.getsource(DeepSpeedEngine)
    for method in (DeepSpeedEngine._save_checkpoint, DeepSpeedEngine._save_zero_checkpoint):
        assert "self.checkpoint_engine.save(" in inspect.getsource(method)
    assert "checkpoint_engine=self.checkpoint_engine" in inspect.getsource(PipelineEngine.module_state_dict)


def test_names_of_optimizers() -> None:
    assert {"adam", "adamw", "lion", "SGD"} <= compat.optimizer_names()
    source = inspect.getsource(DeepSpeedEngine._configure_basic_optimizer)
    assert "getattr(torch.optim, self.optimizer_name())" in source


def test_the_store_of_the_process_group(tmp_path: Any) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert not compat.process_group_store().check(["key"])
        compat.process_group_store().set("key", "1")
        assert compat.process_group_store().check(["key"])
    finally:
        torch.distributed.destroy_process_group()
