"""What the planner chooses: parallel degrees, microbatches, memory options."""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["uniform", "separate"]


@dataclasses.dataclass(frozen=True, order=True)
class Degrees:
    """Parallel degrees of a pipeline, or of one module.

    Attributes
    ----------
    tensor, pipeline, data : int
        Ranks that share every layer, pipeline stages, and replicas.
    """

    tensor: int
    pipeline: int
    data: int

    @property
    def num_gpus(self) -> int:
        """GPUs that these degrees use."""
        return self.tensor * self.pipeline * self.data


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to train: who holds what, in how many microbatches.

    Attributes
    ----------
    encoder : Degrees or None
        Of encoder and projector on GPUs of their own; None in a uniform pipeline, where all layers form
        one pipeline with the same replicas.
    llm : Degrees
        Of the LLM, or of the whole uniform pipeline.
    num_microbatches : int
        Microbatches of one step on one replica of the LLM.
    activation_checkpointing : bool
    zero_stage : int
        0 or 1.
    """

    encoder: Degrees | None
    llm: Degrees
    num_microbatches: int
    activation_checkpointing: bool
    zero_stage: int

    @property
    def kind(self) -> Kind:
        """Whether encoder and LLM share their GPUs."""
        return "uniform" if self.encoder is None else "separate"

    @property
    def num_gpus(self) -> int:
        """GPUs in use."""
        return self.llm.num_gpus + (self.encoder.num_gpus if self.encoder else 0)

    @property
    def num_stages(self) -> int:
        """Pipeline stages that a microbatch passes."""
        return self.llm.pipeline + (self.encoder.pipeline if self.encoder else 0)

    @property
    def stage_degrees(self) -> list[Degrees]:
        """Degrees of the part that holds each stage, first stage first."""
        encoder = [self.encoder] * self.encoder.pipeline if self.encoder else []
        return [*encoder, *[self.llm] * self.llm.pipeline]

    def __str__(self) -> str:
        def text(degrees: Degrees) -> str:
            return f"tp{degrees.tensor} pp{degrees.pipeline} dp{degrees.data}"

        parts = [text(self.llm)] if self.encoder is None else [text(self.encoder), text(self.llm)]
        options = " ckpt" if self.activation_checkpointing else ""
        return f"{' + '.join(parts)} m{self.num_microbatches} zero{self.zero_stage}{options}"


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """Which layouts are looked at.

    Attributes
    ----------
    num_gpus : int
        All of them are used.
    kinds : tuple of {"uniform", "separate"}
        uniform: one pipeline for all layers. separate: encoder and LLM on GPUs of their own, the replicas
        of one a multiple of those of the other.
    max_tensor : int
        Largest tensor-parallel degree; it also has to fit into a node and divide the heads.
    min_stages, max_stages : int
        Limits of the pipeline stages that a microbatch passes; 0: no upper limit.
    num_microbatches : tuple of int
        If not empty, only these numbers of microbatches.
    checkpointing : tuple of bool
    zero_stages : tuple of int
    """

    num_gpus: int
    kinds: tuple[Kind, ...] = ("uniform",)
    max_tensor: int = 1
    min_stages: int = 1
    max_stages: int = 0
    num_microbatches: tuple[int, ...] = ()
    checkpointing: tuple[bool, ...] = (False, True)
    zero_stages: tuple[int, ...] = (0, 1)


def divisors(number: int) -> list[int]:
    """All positive divisors, ascending."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})
