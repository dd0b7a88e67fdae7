"""The ``"dflop"`` block of a DeepSpeed configuration, typed and documented field by field.

DeepSpeed ignores top-level keys that it does not know, so the block travels inside the same
JSON file. Inside the block an unknown key is an error that names the nearest valid one.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError, model_validator

from dflop_ds.config.base import Block
from dflop_ds.config.data import DataConfig, LossConfig
from dflop_ds.config.explain import explain, nearest
from dflop_ds.config.finetune import FinetuneConfig
from dflop_ds.config.model import ModelConfig, ParallelConfig
from dflop_ds.config.scheduler import CostConfig, SchedulerConfig
from dflop_ds.config.training import TelemetryConfig, TrainConfig
from dflop_ds.errors import ConfigError

BLOCK = "dflop"


class DflopConfig(Block):
    """The whole ``"dflop"`` block."""

    enabled: bool = Field(
        default=True, description="Use dflop_ds. A configuration without the block counts as not enabled."
    )
    seed: int = Field(
        default=1234, ge=0, le=2**31 - 1, description="Seed of the sample order and of random weights."
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model is trained.")
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="How the model is cut into pipeline stages."
    )
    finetune: FinetuneConfig = Field(
        default_factory=FinetuneConfig, description="Which part of the model is trained."
    )
    data: DataConfig = Field(default_factory=DataConfig, description="Which samples are read.")
    loss: LossConfig = Field(
        default_factory=LossConfig, description="What is averaged over the global batch."
    )
    cost: CostConfig = Field(default_factory=CostConfig, description="Where predicted times come from.")
    scheduler: SchedulerConfig = Field(
        default_factory=SchedulerConfig, description="How samples are put into microbatches."
    )
    telemetry: TelemetryConfig = Field(
        default_factory=TelemetryConfig, description="What is measured while training."
    )
    train: TrainConfig = Field(default_factory=TrainConfig, description="What the training entry point does.")

    @model_validator(mode="after")
    def _adaptive_needs_telemetry(self) -> DflopConfig:
        if self.cost.adaptive and not self.telemetry.enabled:
            raise ValueError(
                "cost.adaptive needs measured stage times: telemetry.enabled is false. Set "
                "telemetry.enabled to true or cost.adaptive to false"
            )
        return self

    @model_validator(mode="after")
    def _resume_needs_position(self) -> DflopConfig:
        if self.train.resume is not None and "enabled" in self.model_fields_set and not self.enabled:
            raise ValueError(
                "train.resume needs dflop_ds, which knows the position in the data: enabled is false, "
                f"train.resume is {self.train.resume!r}. Set resume to null"
            )
        return self

    def require_training_inputs(self, has_data: bool = False) -> None:
        """Check what the training entry point needs beyond a valid block.

        Parameters
        ----------
        has_data : bool
            The training data are given in another way than by ``data.train_path``.

        Raises
        ------
        ConfigError
            If the model, the data or the length of training is not given, all gaps at once.
        """
        gaps = []
        if self.model.path is None:
            gaps.append("dflop.model.path: must name a local Hugging Face directory; found null. Set it.")
        if self.data.train_path is None and not has_data:
            gaps.append("dflop.data.train_path: must name a JSON or JSONL file; found null. Set it.")
        if self.train.num_steps is None and self.train.num_epochs is None:
            gaps.append(
                "dflop.train: num_steps or num_epochs must be given; found neither. Set one of the two."
            )
        if self.train.eval_every is not None and self.data.eval_path is None:
            gaps.append(
                f"dflop.data.eval_path: must be given with dflop.train.eval_every = {self.train.eval_every}; "
                "found null. Set it, or remove eval_every."
            )
        if gaps:
            raise ConfigError("\n".join(gaps))


def parse_dflop(ds_config: dict[str, Any]) -> DflopConfig:
    """Validate the ``"dflop"`` block of a DeepSpeed configuration.

    Parameters
    ----------
    ds_config : dict
        A whole DeepSpeed configuration. Without a block the defaults are returned with
        ``enabled`` set to False.

    Raises
    ------
    ConfigError
        One line for each problem: where, what must hold, the value found and the remedy.
    """
    if BLOCK not in ds_config:
        likely = nearest(BLOCK, [key.lower() for key in ds_config if isinstance(key, str)], cutoff=0.8)
        if likely is not None:
            raise ConfigError(
                f"the block must be called {BLOCK!r}, found the key {likely!r}, which DeepSpeed ignores. "
                "Rename it."
            )
        return DflopConfig(enabled=False)
    try:
        return DflopConfig.model_validate(ds_config[BLOCK])
    except ValidationError as error:
        raise ConfigError(explain(error, DflopConfig, BLOCK)) from None


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the ``"dflop"`` block, with a description of every field."""
    return DflopConfig.model_json_schema()
