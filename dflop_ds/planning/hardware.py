"""What the planner knows of a cluster: speed and memory of a GPU, bandwidth and latency of its links.

Figures of the presets and where they come from (GB and TFLOP are powers of ten):

- A100 80 GB SXM: 312 dense bf16 TFLOP/s, 19.5 fp32 TFLOP/s, 80 GB at 2,039 GB/s, NVLink 600 GB/s both
  directions together (NVIDIA A100 datasheet, June 2021); one 200 Gb/s InfiniBand port per GPU (DGX A100
  user guide). 52 % of the peak is what Narayanan et al. 2021 (arXiv 2104.04473, table 1) reach on it.
- H100 80 GB SXM: 989 dense bf16 TFLOP/s, 67 fp32 TFLOP/s, 80 GB at 3.35 TB/s, NVLink 900 GB/s (NVIDIA H100
  datasheet; its 1,979 TFLOP/s are with sparsity); one 400 Gb/s port per GPU (DGX H100 user guide). 41 % is
  the lowest of the utilisations that the README of Megatron-LM reports for it (41 to 48 %).
- H200 SXM: the same chip with 141 GB at 4.8 TB/s (NVIDIA H200 datasheet).
- Share of the peak in attention: 0.6 on A100 (Dao 2023, arXiv 2307.08691, abstract: 50 to 73 %), 0.35 on
  Hopper (Shah et al. 2024, arXiv 2407.08608, abstract: 35 % by FlashAttention-2).
- Latencies: one step of a ring, 3.4 us over NVLink and 14 us over the network, and 8.4 us per collective: the
  constants of NCCL's own tuning model (``src/graph/tuning.cc``, ring, simple protocol).
- CPU, one core per rank: 96 fp32 GFLOP/s is 3 GHz with two 8-lane AVX2 multiply-adds a cycle; 25.6 GB/s is
  one channel of DDR4-3200 (JEDEC JESD79-4), and a transfer within the machine passes it twice; 10 Gb/s
  Ethernet.

Assumptions without a source, which a profile or a file of your own replaces: 100 us to launch a layer in one
direction, and all shares, latencies, memory and overhead of ``cpu``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflop_ds.cost.files import check_schema, read_json
from dflop_ds.errors import ConfigError

SCHEMA_VERSION = 1

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]


class Hardware(BaseModel):
    """A cluster of equal GPUs in equal nodes; as a file the same fields in JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1] = Field(default=1, description="Version of this file format.")
    name: str = Field(min_length=1, description="What the figures describe.")
    peak_flops_per_s: dict[Literal["float32", "bfloat16"], Positive] = Field(
        description="Dense peak of one GPU by data type, in FLOP/s."
    )
    matmul_share: Share = Field(description="Share of the peak that matrix products reach.")
    attention_share: Share = Field(description="Share of the peak that attention kernels reach.")
    memory_bytes: Positive = Field(description="Memory of one GPU, in bytes.")
    memory_bytes_per_s: Positive = Field(description="Bandwidth of that memory, in bytes/s.")
    layer_overhead_s: Seconds = Field(description="Seconds to launch one layer in one direction.")
    gpus_per_node: Annotated[int, Field(ge=1)] = Field(description="GPUs that share a node (count).")
    intra_node_bytes_per_s: Positive = Field(
        description="Bandwidth of one GPU to others of its node, one direction, in bytes/s."
    )
    inter_node_bytes_per_s: Positive = Field(
        description="Bandwidth of one GPU to another node, one direction, in bytes/s."
    )
    intra_node_latency_s: Seconds = Field(description="Seconds before the first byte within a node.")
    inter_node_latency_s: Seconds = Field(description="Seconds before the first byte between nodes.")
    collective_latency_s: Seconds = Field(description="Seconds to start one collective operation.")


_H100 = Hardware(
    name="h100-80g",
    peak_flops_per_s={"bfloat16": 989e12, "float32": 67e12},
    matmul_share=0.41,
    attention_share=0.35,
    memory_bytes=80e9,
    memory_bytes_per_s=3.35e12,
    layer_overhead_s=1e-4,
    gpus_per_node=8,
    intra_node_bytes_per_s=450e9,
    inter_node_bytes_per_s=50e9,
    intra_node_latency_s=3.4e-6,
    inter_node_latency_s=14e-6,
    collective_latency_s=8.4e-6,
)

PRESETS: dict[str, Hardware] = {
    "a100-80g": Hardware(
        name="a100-80g",
        peak_flops_per_s={"bfloat16": 312e12, "float32": 19.5e12},
        matmul_share=0.52,
        attention_share=0.6,
        memory_bytes=80e9,
        memory_bytes_per_s=2.039e12,
        layer_overhead_s=1e-4,
        gpus_per_node=8,
        intra_node_bytes_per_s=300e9,
        inter_node_bytes_per_s=25e9,
        intra_node_latency_s=3.4e-6,
        inter_node_latency_s=14e-6,
        collective_latency_s=8.4e-6,
    ),
    "h100-80g": _H100,
    # The same chip with other memory.
    "h200": _H100.model_copy(update={"name": "h200", "memory_bytes": 141e9, "memory_bytes_per_s": 4.8e12}),
    "cpu": Hardware(
        name="cpu",
        peak_flops_per_s={"bfloat16": 96e9, "float32": 96e9},
        matmul_share=0.5,
        attention_share=0.25,
        memory_bytes=8e9,
        memory_bytes_per_s=25.6e9,
        layer_overhead_s=2e-4,
        gpus_per_node=8,
        intra_node_bytes_per_s=12.8e9,
        inter_node_bytes_per_s=1.25e9,
        intra_node_latency_s=5e-5,
        inter_node_latency_s=1e-4,
        collective_latency_s=1e-4,
    ),
}
"""By name. Shares, latencies and overhead of ``cpu`` are rough: measure a profile before you rely on it."""


def load_hardware(name_or_path: str | Path) -> Hardware:
    """Hardware of a preset or of a JSON file.

    Raises
    ------
    ConfigError
        If it is neither, or the file has an unknown, missing or impossible value.
    """
    if str(name_or_path) in PRESETS:
        return PRESETS[str(name_or_path)]
    if not Path(name_or_path).is_file():
        raise ConfigError(
            f"hardware must be one of {sorted(PRESETS)} or a JSON file, found {name_or_path}. "
            "Name one of them, or write a file."
        )
    content = read_json(name_or_path, "hardware description")
    check_schema(content, f"hardware description ({name_or_path})", SCHEMA_VERSION)
    try:
        return Hardware.model_validate(content)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise ConfigError(
            f"{name_or_path} must describe the hardware; {'; '.join(lines)}. Correct these fields."
        ) from error
