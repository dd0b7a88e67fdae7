"""The training run and its measurements: ``dflop.telemetry``, ``dflop.train``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dflop_ds.config.base import Block, NonEmptyStr, PositiveInt


class TelemetryConfig(Block):
    """``dflop.telemetry``: what is measured and written down while training."""

    enabled: bool = Field(default=True, description="Measure stage times and idle times of each step.")
    trace: NonEmptyStr | None = Field(
        default=None, description="Path of a Perfetto trace file to write. null: no trace."
    )
    trace_step: PositiveInt | None = Field(
        default=None, description="Training step that is traced, counted from 1. null: the last one."
    )
    plan_log: NonEmptyStr | None = Field(
        default=None,
        description="JSONL file that receives each step's assignment and what rank 0 measured; the other "
        "ranks write beside it, with their number in the name. null: none.",
    )

    @model_validator(mode="after")
    def _step_needs_trace(self) -> TelemetryConfig:
        if self.trace_step is not None and self.trace is None:
            raise ValueError(
                f"trace_step needs a trace file: trace_step is {self.trace_step}, trace is null. "
                "Set trace to a path or remove trace_step"
            )
        return self


class TrainConfig(Block):
    """``dflop.train``: what the training entry point does."""

    num_steps: PositiveInt | None = Field(
        default=None, description="Optimizer steps to train (count). Give num_steps or num_epochs, not both."
    )
    num_epochs: float | None = Field(
        default=None, gt=0, description="Passes over the training data to train."
    )
    output_dir: NonEmptyStr = Field(default="runs/train", description="Folder for checkpoints and logs.")
    log_every: PositiveInt = Field(default=1, description="Steps between log lines.")
    eval_every: PositiveInt | None = Field(
        default=None, description="Steps between evaluations. null: never."
    )
    save_every: PositiveInt | None = Field(
        default=None, description="Steps between checkpoints; the last step has one too. null: never."
    )
    keep_last: PositiveInt | None = Field(
        default=None,
        description="Checkpoints that stay when another is complete; older ones are removed. Those with a "
        "name of your own stay. null: all.",
    )
    save_on_stop: bool = Field(
        default=True, description="Save a checkpoint when SIGTERM or Ctrl-C ends training early."
    )
    resume: Literal["auto"] | NonEmptyStr | None = Field(
        default=None,
        description="Checkpoint to go on from, with optimizer, position in the data and metrics: a folder of "
        "checkpoints or one of them. auto: the last one in output_dir, or a new start if there is none. "
        "null: a new start.",
    )
    export_dir: NonEmptyStr | None = Field(
        default=None,
        description="Folder that receives the trained model in Hugging Face format at the end. What it held "
        "before is replaced. null: no export.",
    )
    export_dtype: Literal["as_trained", "bf16", "fp32"] = Field(
        default="as_trained", description="Precision of the exported weights."
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.num_steps is not None and self.num_epochs is not None:
            raise ValueError(
                "only one of num_steps and num_epochs may be given: num_steps is "
                f"{self.num_steps}, num_epochs is {self.num_epochs}. Remove one"
            )
        return self
