"""Every private or undocumented DeepSpeed name that dflop_ds relies on, in one place.

``tests/contract/test_deepspeed_contract.py`` checks each of them against the installed version.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

INSTRUCTION_MAP_ATTRIBUTE = "_INSTRUCTION_MAP"

ENGINE_METHODS: dict[str, tuple[str, ...]] = {
    "_build_data_iter": ("self", "dataset"),
    "_next_batch": ("self",),
    "_exec_load_micro_batch": ("self", "buffer_id"),
    "_exec_forward_pass": ("self", "buffer_id"),
    "_exec_backward_pass": ("self", "buffer_id"),
    "_exec_reduce_grads": ("self",),
    "_exec_recv_activations": ("self", "buffer_id"),
    "_exec_send_grads": ("self", "buffer_id"),
    "_exec_recv_grads": ("self", "buffer_id"),
    "set_train_batch_size": ("self", "train_batch_size"),
    "set_dataloader": ("self", "loader"),
    "set_dataiterator": ("self", "iterator"),
    "_get_ckpt_name": ("self", "checkpoints_path", "tag"),
    "_get_zero_ckpt_name": ("self", "checkpoints_path", "tag"),
}
"""Methods that the engine overrides or calls, with their parameter names."""

MODULE_METHODS: dict[str, tuple[str, ...]] = {
    "_partition_layers": ("self", "method"),
    "_count_layer_params": ("self",),
    "_set_bounds": ("self", "start", "stop"),
}
"""Methods of ``PipelineModule`` that the module overrides or calls."""

PIPE_BUFFERS = ("inputs", "labels", "outputs", "output_tensors")
"""Keys of ``engine.pipe_buffers``."""


def instruction_map(engine_class: type[PipelineEngine]) -> dict[type, Callable[..., None]]:
    """Copy of the map through which DeepSpeed dispatches its pipeline instructions."""
    return dict(getattr(engine_class, INSTRUCTION_MAP_ATTRIBUTE))


def overridden_instructions(engine_class: type[PipelineEngine]) -> dict[type, Callable[..., None]]:
    """Map that dispatches to the overrides of ``engine_class``.

    DeepSpeed's map holds the functions of the *base* class, so overriding a method is not enough.
    """
    base = instruction_map(PipelineEngine)
    return {instruction: getattr(engine_class, function.__name__) for instruction, function in base.items()}


def backward_once(engine: PipelineEngine, outputs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """One autograd pass for all float outputs of a stage, seen by DeepSpeed's hooks as its own.

    Parameters
    ----------
    outputs, grads : list of Tensor
        Stage outputs that require a gradient, and the gradients received for them.
    """
    if engine.using_bf16_optimizer:
        engine.optimizer.clear_lp_grads()
    engine._running_engine_backward = True
    try:
        torch.autograd.backward(outputs, grads)
    finally:
        engine._running_engine_backward = False
    if engine.using_bf16_optimizer and not engine._config.bfloat16_config.immediate_grad_update:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)


def received_gradients(engine: PipelineEngine) -> list[torch.Tensor]:
    """Gradients of the float outputs, as the last ``RecvGrad`` left them, copied.

    Autograd may keep a slice of what it is given as the gradient of a parameter (a newline token is a row of
    the output); DeepSpeed receives the next gradient into the same memory.
    """
    layer = engine.grad_layer
    return [layer.clone()] if isinstance(layer, torch.Tensor) else [gradient.clone() for gradient in layer]


def release_outputs(engine: PipelineEngine, buffer_id: int) -> None:
    """Free the forward results of one buffer when nothing reads them any more."""
    engine.pipe_buffers["output_tensors"][buffer_id] = None
    engine.pipe_buffers["outputs"][buffer_id] = None


def set_num_microbatches(engine: PipelineEngine, num_microbatches: int) -> None:
    """Change how many microbatches the next steps run; loss and gradient scaling follow."""
    if num_microbatches != engine.micro_batches:
        engine.set_train_batch_size(num_microbatches * engine.micro_batch_size * engine.dp_world_size)


COMPUTE_INSTRUCTIONS: tuple[type, ...] = (schedule.ForwardPass, schedule.BackwardPass)
"""Instructions during which a stage is busy."""


def fill_missing_gradients(engine: PipelineEngine) -> None:
    """Give a zero gradient to every trainable parameter that took no part in this step.

    A replica whose microbatches hold no image has no gradients for the encoder blocks, another
    one has: their reductions would not match.
    """
    if engine.using_bf16_optimizer:
        _count_all_fp32_gradients(engine.optimizer)
        return
    accumulates = getattr(engine.optimizer, "use_grad_accum_attribute", False)
    name = "grad_accum" if accumulates else "grad"
    for parameter in engine.module.parameters():
        if parameter.requires_grad and getattr(parameter, name, None) is None:
            dtype = engine.optimizer.gradient_accumulation_dtype if accumulates else parameter.dtype
            setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype))


def _count_all_fp32_gradients(optimizer: Any) -> None:
    """Let every parameter count in the bf16 optimizer's norm and be clipped; fp32 gradients exist, as zeros.

    Otherwise a replica that had no use for a parameter leaves its reduced gradient out of the norm.
    """
    groups = zip(
        optimizer.bf16_groups,
        optimizer.fp32_groups_gradients,
        optimizer.fp32_groups_has_gradients,
        strict=True,
    )
    for parameters, gradients, flags in groups:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter._hp_grad = gradient
        flags[:] = [True] * len(parameters)


def count_in_gradient_norm(module: torch.nn.Module) -> None:
    """Let the parameters of every stage count when gradients are clipped.

    In fp32 without ZeRO, DeepSpeed takes the norm over the first stage's parameters and those
    marked ``model_parallel``. Parameters that another stage owns as well (tied) count there.
    """
    for parameter in module.parameters():
        parameter.model_parallel = not getattr(parameter, "ds_pipe_replicated", False)


def make_engine(
    engine_class: type[PipelineEngine], ds_config: dict[str, Any], **kwargs: Any
) -> PipelineEngine:
    """Build a pipeline engine of the given class as ``deepspeed.initialize`` builds its own."""
    mpu = kwargs["model"].mpu()
    config_class = DeepSpeedConfig(ds_config, mpu)
    set_flags = getattr(deepspeed, "set_optimizer_flags", None)
    if set_flags is not None:
        set_flags(config_class, kwargs["model"])
    engine = engine_class(mpu=mpu, config=ds_config, config_class=config_class, **kwargs)
    configure_gc = getattr(engine, "_configure_python_gc", None)
    if configure_gc is not None:
        configure_gc()
    return engine


def optimizer_names() -> set[str]:
    """Values of ``optimizer.type`` that DeepSpeed can build for a pipeline in bf16 or fp32."""
    built = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    # LAMB needs the loss scale of fp16, L-BFGS a closure, SparseAdam sparse gradients.
    return (built | set(DEEPSPEED_OPTIMIZERS)) - {"Optimizer", "lamb", "LBFGS", "SparseAdam"}


def process_group_store() -> Any:
    """Key-value store through which the ranks met; it lives as long as rank 0."""
    return torch.distributed.distributed_c10d._get_default_store()


def keeps_partitions(optimizer: Any) -> bool:
    """Whether an engine's optimizer holds flat fp32 partitions: ZeRO-1, or bf16 in a pipeline."""
    return hasattr(optimizer, "dp_process_group")


def flat_partitions(optimizer: Any) -> list[torch.Tensor]:
    """This rank's fp32 partition of every parameter group, as the wrapped optimizer sees it."""
    return [group["params"][0] for group in optimizer.optimizer.param_groups]


def partition_piece(parameter: torch.Tensor) -> tuple[int, int, int, int] | None:
    """The part of a parameter that this rank's partition holds.

    Returns
    -------
    tuple of int or None
        Parameter group, start in the partition, start in the parameter and number of elements; None where
        other ranks hold all of it.
    """
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    partition, own = mapping.hp_fragment_address, mapping.lp_fragment_address
    return int(mapping.param_group_index), int(partition.start), int(own.start), int(own.numel)


def optimizer_file(engine: PipelineEngine) -> str:
    """Name of the file in a checkpoint that holds this rank's optimizer state."""
    name = engine._get_zero_ckpt_name if keeps_partitions(engine.optimizer) else engine._get_ckpt_name
    return Path(name("", "tag")).name


def saves_at_once(engine: PipelineEngine) -> bool:
    """Whether a checkpoint is on disk when ``save_checkpoint`` returns."""
    decoupled = getattr(engine.checkpoint_engine, "is_decoupled", None)
    return decoupled is None or not decoupled()
