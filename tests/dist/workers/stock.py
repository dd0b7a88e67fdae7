"""``"enabled": false`` against a direct call of ``deepspeed.initialize``."""

import deepspeed
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.pipe.engine import PipelineEngine

import dflop_ds
from dflop_ds.config import parse_dflop
from dflop_ds.runtime.distributed import leave
from tests.support.training import report, worker_arguments

arguments = worker_arguments()
config = arguments["config"]
deepspeed.init_distributed(dist_backend="gloo")
losses, types = [], []
for initialize in (dflop_ds.initialize, deepspeed.initialize):
    setup = dflop_ds.prepare(config, parse_dflop(config))
    engine, _, loader, _ = initialize(
        model=setup.model,
        model_parameters=[p for p in setup.model.parameters() if p.requires_grad],
        training_data=setup.dataset,
        collate_fn=setup.collate_fn,
        config=config,
    )
    types.append(
        [
            type(engine) is PipelineEngine,
            type(loader) is DeepSpeedDataLoader
            or type(getattr(loader, "loader", None)) is DeepSpeedDataLoader,
        ]
    )
    losses.append([float(engine.train_batch()) for _ in range(2)])
report(arguments, {"losses": losses, "types": types})
leave()
