"""The ``"dflop"`` block of a DeepSpeed configuration, typed and documented field by field.

DeepSpeed ignores top-level keys that it does not know, so the block travels inside the same
JSON file. Inside the block an unknown key is an error that names the nearest valid one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflop_ds.config.explain import explain, nearest
from dflop_ds.errors import ConfigError

BLOCK = "dflop"

PositiveInt = Annotated[int, Field(ge=1)]
NonEmptyStr = Annotated[str, Field(min_length=1)]


class _Block(BaseModel):
    """Base of every block: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelConfig(_Block):
    """``dflop.model``: which model is trained."""

    path: NonEmptyStr | None = Field(
        default=None,
        description="Local Hugging Face directory with config.json, the tokenizer and the preprocessor. "
        "Required by the training entry point.",
    )
    weights: Literal["auto", "pretrained", "random"] = Field(
        default="auto",
        description="Where the initial weights come from. auto: pretrained if the directory holds "
        "safetensors files, random otherwise.",
    )
    attention: Literal["auto", "segments", "varlen"] = Field(
        default="auto",
        description="Attention over the packed samples of a microbatch. segments: one call per sample, on "
        "any device. varlen: one variable-length kernel, CUDA only. auto: the fastest that the device has.",
    )


class ParallelConfig(_Block):
    """``dflop.parallel``: how the model is cut into pipeline stages."""

    pipeline_stages: PositiveInt | Literal["auto"] = Field(
        default="auto",
        description="Number of pipeline stages; the number of ranks must be a multiple of it. auto: all "
        "ranks form one pipeline if there are at most 2, otherwise an explicit number is required.",
    )
    split: Literal["auto", "parameters", "uniform"] | Annotated[list[PositiveInt], Field(min_length=1)] = (
        Field(
            default="auto",
            description="How layers are divided among stages. auto: balanced by predicted time. parameters: "
            "balanced by parameter count. uniform: by layer count. A list gives the number of layers of "
            "each stage, first stage first.",
        )
    )
    activation_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, more time."
    )

    @model_validator(mode="after")
    def _split_matches_stages(self) -> ParallelConfig:
        if isinstance(self.split, list) and self.pipeline_stages != len(self.split):
            raise ValueError(
                "a split given as a list must have one entry per stage: pipeline_stages is "
                f"{self.pipeline_stages!r}, the list has {len(self.split)}. "
                f"Set pipeline_stages to {len(self.split)} or change the list"
            )
        return self


class DataConfig(_Block):
    """``dflop.data``: which samples are read, and what happens to unusable ones."""

    train_path: NonEmptyStr | None = Field(
        default=None,
        description="LLaVA-style JSON or JSONL file of training samples. Required by the "
        "training entry point.",
    )
    eval_path: NonEmptyStr | None = Field(
        default=None, description="Same, for evaluation. null: no evaluation."
    )
    media_root: NonEmptyStr | None = Field(
        default=None, description="Folder that media paths are relative to. null: the folder of train_path."
    )
    max_frames: PositiveInt = Field(
        default=32, description="Upper limit of frames taken from one video (count)."
    )
    frames_per_second: float = Field(
        default=1.0,
        gt=0,
        description="Sampling rate of videos, in frames per second of film, up to max_frames.",
    )
    max_tokens: PositiveInt | None = Field(
        default=None,
        description="Longest LLM sequence of one sample, in tokens, media tokens included. Longer samples "
        "are oversized. null: no limit but that of a microbatch.",
    )
    broken: Literal["error", "drop"] = Field(
        default="error", description="What happens to a sample whose text or media cannot be read."
    )
    oversized: Literal["error", "drop"] = Field(
        default="error", description="What happens to a sample that exceeds max_tokens or fits no microbatch."
    )
    scan: Literal["headers", "decode"] = Field(
        default="headers",
        description="How sample sizes are found before training. headers: file headers only. decode: "
        "decode every file, which also finds damaged ones, and takes far longer.",
    )
    tail: Literal["partial", "drop"] = Field(
        default="partial",
        description="What happens to the last, incomplete global batch of an epoch. partial: a smaller "
        "step. drop: skipped.",
    )
    shuffle: bool = Field(
        default=True, description="Draw a new order each epoch, from the seed and the epoch."
    )
    num_workers: int = Field(
        default=2, ge=0, description="Loader processes per rank (count). 0: load in the rank."
    )
    shape_cache: NonEmptyStr | None = Field(
        default=None, description="NPZ file that keeps the sample sizes between runs. null: not kept."
    )
    scan_processes: PositiveInt = Field(default=1, description="Processes that scan the data set (count).")


class LossConfig(_Block):
    """``dflop.loss``: what is averaged over the global batch."""

    reduction: Literal["token", "sample"] = Field(
        default="token",
        description="token: mean over all supervised tokens of the global batch. sample: mean over samples "
        "of each sample's token mean.",
    )


class CostConfig(_Block):
    """``dflop.cost``: where predicted times come from."""

    profile: NonEmptyStr = Field(
        default="auto",
        description="Path of a profile saved by `dflop-ds profile model`, or auto: measure this machine at "
        "start-up and keep the result in train.output_dir for the next start.",
    )
    profile_budget_s: float = Field(
        default=30.0, gt=0, description="Time that profiling may take, in seconds."
    )
    adaptive: bool = Field(
        default=False,
        description="Correct predicted times by the stage times that training measures: slow ranks get "
        "lighter microbatches, mispredicted shapes other costs. Needs telemetry. Plans then depend on "
        "measurements, so that two runs may put samples into other microbatches; losses stay the same.",
    )


class SchedulerConfig(_Block):
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
        description="Hard limit of tiles plus frames in one microbatch. auto: twice the mean, or the largest "
        "sample. null: none.",
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


class TelemetryConfig(_Block):
    """``dflop.telemetry``: what is measured and written down while training."""

    enabled: bool = Field(default=True, description="Measure stage times and idle times of each step.")
    trace: NonEmptyStr | None = Field(
        default=None, description="Path of a Perfetto trace file to write. null: no trace."
    )
    trace_step: PositiveInt | None = Field(
        default=None, description="Training step that is traced, counted from 1. null: the last one."
    )
    plan_log: NonEmptyStr | None = Field(
        default=None, description="JSONL file that receives each step's assignment. null: none."
    )

    @model_validator(mode="after")
    def _step_needs_trace(self) -> TelemetryConfig:
        if self.trace_step is not None and self.trace is None:
            raise ValueError(
                f"trace_step needs a trace file: trace_step is {self.trace_step}, trace is null. "
                "Set trace to a path or remove trace_step"
            )
        return self


class TrainConfig(_Block):
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
        default=None, description="Steps between checkpoints. null: never."
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.num_steps is not None and self.num_epochs is not None:
            raise ValueError(
                "only one of num_steps and num_epochs may be given: num_steps is "
                f"{self.num_steps}, num_epochs is {self.num_epochs}. Remove one"
            )
        return self


class DflopConfig(_Block):
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

    def require_training_inputs(self) -> None:
        """Check what the training entry point needs beyond a valid block.

        Raises
        ------
        ConfigError
            If the model, the data or the length of training is not given, all gaps at once.
        """
        gaps = []
        if self.model.path is None:
            gaps.append("dflop.model.path: must name a local Hugging Face directory; found null. Set it.")
        if self.data.train_path is None:
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
