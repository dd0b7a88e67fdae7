"""Export of adapters from a running pipeline."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from deepspeed import comm as dist
from safetensors.torch import load, save

from dflop_ds.errors import ConfigError
from dflop_ds.runtime import distributed
from dflop_ds.runtime.module import DflopPipelineModule

logger = logging.getLogger(__name__)


def save_adapter(model: DflopPipelineModule, directory: str | Path, base_model: str) -> None:
    """Write what fine-tuning has trained in the format of ``peft``; a collective call.

    The trained weights of all stages go to rank 0, which writes them.

    Parameters
    ----------
    model : DflopPipelineModule
        With adapters.
    directory : str or Path
        ``PeftModel.from_pretrained(model, directory)`` loads it.
    base_model : str
        Path of the frozen model, noted in the adapter's configuration.

    Raises
    ------
    ConfigError
        If the model has no adapters.
    """
    adapters = None if model.finetuning is None else model.finetuning.adapters
    if adapters is None:
        raise ConfigError("an adapter can be saved of a model with dflop.finetune.lora, found none. Set it.")
    own = {
        layer.hf_name(name): parameter.detach().cpu().contiguous()
        for layer in model.local_layers()
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad
    }
    topology, trained = model.topology(), dict[str, torch.Tensor]()
    for stage in range(model.num_pipeline_stages()):
        owner = topology.get_rank(pipe=stage, data=0)
        payload = save(own) if dist.get_rank() == owner else None
        trained |= load(distributed.broadcast_bytes(payload, src=owner))

    def write() -> bytes:
        adapters.save(Path(directory), trained, base_model)
        logger.info("the adapter is in %s", directory)
        return b""

    distributed.on_first_rank(write)
