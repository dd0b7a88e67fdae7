"""Predicted times and what is done with them: ``dflop.cost``, ``dflop.scheduler``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dflop_ds.config.base import Block, NonEmptyStr, PositiveInt


class CostConfig(Block):
    """``dflop.cost``: where predicted times come from."""

    profile: NonEmptyStr = Field(
        default="auto",
        description="Path of a profile saved by `dflop-ds profile model`, or auto: measure this machine at "
        "start-up and keep the result in train.output_dir for the next start.",
    )
    profile_budget_s: float = Field(
        default=30.0, gt=0, description="Time that profiling may take, in seconds."
    )
    on_other_conditions: Literal["warn", "refuse"] = Field(
        default="warn",
        description="What happens if the saved profile was measured on other hardware, or with another type, "
        "attention, checkpointing or tensor-parallel degree. That of another model is always refused.",
    )
    adaptive: bool = Field(
        default=False,
        description="Correct predicted times by the stage times that training measures: slow ranks get "
        "lighter microbatches, mispredicted shapes other costs. Needs telemetry. Plans then depend on "
        "measurements, so that two runs may put samples into other microbatches; losses stay the same.",
    )


class SchedulerConfig(Block):
    """``dflop.scheduler``: how samples are put into microbatches."""

    policy: Literal["cp_sat", "lpt", "blind"] = Field(
        default="cp_sat",
        description="cp_sat: largest first, then improved by a constraint solver. lpt: largest first. "
        "blind: by position, as plain DeepSpeed does.",
    )
    max_tokens_per_microbatch: PositiveInt | Literal["auto"] | None = Field(
        default="auto",
        description="Hard limit of LLM tokens in one microbatch. auto: twice the mean, or the largest "
        "sample. null: none.",
    )
    max_encoder_inputs_per_microbatch: PositiveInt | Literal["auto"] | None = Field(
        default="auto",
        description="Hard limit of encoder inputs in one microbatch: tiles plus frames, patches where images "
        "keep their size, audio positions. auto: twice the mean, or the largest sample. null: none.",
    )
    deterministic_time_s: float = Field(
        default=0.1,
        gt=0,
        le=3600,
        description="Solver effort per global batch, in the solver's deterministic seconds, which do not "
        "depend on the load of the machine.",
    )
    lookahead: PositiveInt = Field(
        default=2, le=64, description="Global batches that are solved ahead of training (count)."
    )
    deadline_s: float = Field(
        default=1.0,
        gt=0,
        le=3600,
        description="Longest wait for a solution, in seconds; after it the step uses the lpt assignment.",
    )
    solver: Literal["process", "thread"] = Field(
        default="process",
        description="Where cp_sat runs. process: beside rank 0, replaced when it crashes or hangs. thread: "
        "inside rank 0, where it shares Python's lock with training.",
    )
    solver_workers: PositiveInt = Field(
        default=1, description="Searches that cp_sat runs at the same time, one core each (count)."
    )
    order: bool = Field(
        default=True,
        description="Make and run smaller microbatches first and last where simulation says that this "
        "shortens a step.",
    )
    min_gain: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Least predicted gain over the data-blind order, as a share of its step time (0.02 is "
        "2 %). Below it a step keeps the data-blind order.",
    )
