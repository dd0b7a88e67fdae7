"""``dflop-ds plan``: choose stages, split, replicas and microbatches for the user's data and cluster."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflop_ds.cli.arguments import check_writable, seconds, whole_number
from dflop_ds.cli.training import measured_costs, read_model_config, unmeasured_costs
from dflop_ds.config import BatchSizes, load_ds_config, parse_dflop, plannable_zero_stages
from dflop_ds.errors import ConfigError
from dflop_ds.planning import report
from dflop_ds.planning.advice import Payoff, oversized_rows, what_is_missing
from dflop_ds.planning.baselines import best_blind, gain_of_balancing
from dflop_ds.planning.evaluation import Evaluation
from dflop_ds.planning.export import plan_config
from dflop_ds.planning.hardware import PRESETS, Hardware, load_hardware
from dflop_ds.planning.layout import SearchSpace
from dflop_ds.planning.search import DEFAULT_SIMULATIONS, Search, search
from dflop_ds.planning.stages import StageTable
from dflop_ds.planning.workload import Workload
from dflop_ds.profiling.table import ProfileTable
from dflop_ds.shapes import ShapeTable

_MOST_LISTED = 10
_ALL_TENSOR_DEGREES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="DeepSpeed configuration with a dflop block")
    add("--gpus", type=whole_number(1), required=True, metavar="N", help="GPUs to plan for")
    add("--shapes", type=Path, required=True, metavar="FILE", help="from `dflop-ds profile data`")
    add(
        "--profile",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="from `dflop-ds profile model`, one for each tensor degree; default: the data sheet of H",
    )
    add(
        "--hardware",
        default="a100-80g",
        metavar="H",
        help=f"{', '.join(PRESETS)} or a JSON file; default: a100-80g",
    )
    add("--gpu-memory-gb", type=float, metavar="GB", help="memory of a GPU; default: of the hardware")
    add("--headroom", type=float, default=0.1, metavar="SHARE", help="share of it left free; default: 0.1")
    add("--batch-size", type=whole_number(1), metavar="N", help="default: train_batch_size of CONFIG")
    add(
        "--layouts",
        choices=("runtime", "all"),
        default="runtime",
        help="runtime: uniform pipelines without tensor parallelism, which training executes (default). "
        "all: also tensor parallelism, and encoder and LLM on GPUs of their own",
    )
    add("--min-stages", type=whole_number(1), default=1, metavar="N", help="fewest pipeline stages")
    add("--max-stages", type=whole_number(0), default=0, metavar="N", help="most pipeline stages; 0: any")
    add(
        "--simulations",
        type=whole_number(0),
        default=DEFAULT_SIMULATIONS,
        metavar="N",
        help=f"layouts to simulate; 0: until proven; default: {DEFAULT_SIMULATIONS}",
    )
    add("--rows", type=whole_number(1), default=8, metavar="N", help="rows of the ranking; default: 8")
    add("--load-s", type=seconds, metavar="S", help="seconds to load an average sample in one process")
    add("--seed", type=whole_number(0), default=0, metavar="S", help="of the drawn batches; default: 0")
    add("--out", type=Path, metavar="FILE", help="DeepSpeed configuration to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, print, write; the exit code is 1 where nothing fits."""
    ds_config = load_ds_config(arguments.config)
    if arguments.out is not None:
        if arguments.layouts != "runtime":
            raise ConfigError(
                "--out writes what training executes, found --layouts all. Use --layouts runtime with --out."
            )
        check_writable(arguments.out, "--out")
    hardware = load_hardware(arguments.hardware)
    profiles = read_profiles(arguments.profile)
    workload = make_workload(ds_config, arguments, hardware, profiles)
    limit_bytes = _limit_bytes(arguments, hardware)
    space = SearchSpace(
        arguments.gpus,
        min_stages=arguments.min_stages,
        max_stages=arguments.max_stages,
        zero_stages=plannable_zero_stages(ds_config),
    )
    if arguments.layouts == "all":
        space = dataclasses.replace(space, kinds=("uniform", "separate"), max_tensor=_ALL_TENSOR_DEGREES)
    found = search(
        workload,
        space,
        limit_bytes=limit_bytes,
        max_simulations=arguments.simulations,
        num_ranked=arguments.rows,
    )
    source = f"unmeasured, data sheet of {hardware.name}"
    if workload.model.measured:
        machines = dict.fromkeys(profile.fingerprint.hardware for _, profile in profiles.values())
        source = f"profile {', '.join(map(str, arguments.profile))}, measured on {', '.join(machines)}"
    print(
        f"{arguments.gpus} GPUs ({hardware.name}), {len(workload.table)} samples, {workload.num_batches} "
        f"drawn batches of {workload.batch_size}; layer times: {source}; predictions, simulated steps"
    )
    best = found.best
    if best is None:
        print(f"\nno layout fits into {limit_bytes / 1e9:.3g} GB per GPU. What is missing:")
        print("\n".join(what_is_missing(workload, space, found, limit_bytes)))
        return 1
    _print_plan(found, best, workload, limit_bytes, arguments.rows)
    print("\n".join(_comparison(found, best, workload, limit_bytes, space.max_tensor)))
    print(_payoff(best, workload, ds_config, arguments.load_s))
    _print_oversized(workload, best, limit_bytes)
    if arguments.out is not None:
        _write(arguments, ds_config, best, workload, limit_bytes, profiles)
    return 0


def _write(
    arguments: argparse.Namespace,
    ds_config: dict[str, Any],
    best: Evaluation,
    workload: Workload,
    limit_bytes: float,
    profiles: Mapping[int, tuple[Path, ProfileTable]],
) -> None:
    # A profile with other checkpointing has other backward times: training then measures its own.
    checkpointing = best.layout.activation_checkpointing
    usable = profiles and profiles[1][1].fingerprint.activation_checkpointing == checkpointing
    content = plan_config(ds_config, best, workload, limit_bytes, str(profiles[1][0]) if usable else None)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"\nwrote {arguments.out} for {arguments.gpus} ranks")


def _print_plan(
    found: Search, best: Evaluation, workload: Workload, limit_bytes: float, num_rows: int
) -> None:
    print(report.search_line(found) + "\n")
    print("\n".join(report.ranking_lines(found, workload, num_rows)) + "\n")
    print("\n".join(report.plan_lines(best, workload, limit_bytes)) + "\n")


def make_workload(
    ds_config: dict[str, Any],
    arguments: argparse.Namespace,
    hardware: Hardware,
    profiles: Mapping[int, tuple[Path, ProfileTable]],
) -> Workload:
    """The planning problem that the arguments describe.

    Raises
    ------
    ConfigError
        If the batch size is not given.
    CostModelError
        If the profile is of another model or lacks a layer kind.
    """
    config = parse_dflop(ds_config)
    model_config = read_model_config(config)
    if profiles:
        tables = {degree: table for degree, (_, table) in profiles.items()}
        model = measured_costs(ds_config, config, model_config, tables, warn=False)
    else:
        model = unmeasured_costs(ds_config, config, model_config, hardware)
    return Workload(
        model,
        ShapeTable.load(arguments.shapes),
        _batch_size(ds_config, arguments),
        hardware=hardware,
        seed=arguments.seed,
    )


def read_profiles(paths: Sequence[Path]) -> dict[int, tuple[Path, ProfileTable]]:
    """Profiles by tensor-parallel degree.

    Raises
    ------
    ConfigError
        If there are some but none of a single GPU, or two of one degree, or they differ in checkpointing.
    """
    profiles: dict[int, tuple[Path, ProfileTable]] = {}
    for path in paths:
        table = ProfileTable.load(path)
        degree = table.fingerprint.tensor_parallel_degree
        if degree in profiles:
            raise ConfigError(
                f"each tensor degree must have one profile, found {profiles[degree][0]} and {path} for "
                f"{degree}. Give one of them."
            )
        profiles[degree] = (path, table)
    if profiles and 1 not in profiles:
        raise ConfigError(
            f"a profile of one GPU must be given, found the tensor degrees {sorted(profiles)}. Add it."
        )
    if len({table.fingerprint.activation_checkpointing for _, table in profiles.values()}) > 1:
        raise ConfigError(
            "profiles must agree in activation checkpointing, found some with and some without it. "
            "Profile again."
        )
    return profiles


def _batch_size(ds_config: dict[str, Any], arguments: argparse.Namespace) -> int:
    given = arguments.batch_size or ds_config.get("train_batch_size")
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return given
    if given is None:
        config = parse_dflop(ds_config)
        stages = config.parallel.pipeline_stages
        if isinstance(stages, int) and arguments.gpus % stages == 0:
            return BatchSizes.from_ds_config(ds_config, arguments.gpus // stages).train_batch_size
    raise ConfigError(
        f"the samples of a step must be given, found train_batch_size {given!r}. Set train_batch_size in the "
        "configuration, or use --batch-size."
    )


def _limit_bytes(arguments: argparse.Namespace, hardware: Hardware) -> float:
    if not 0.0 <= arguments.headroom < 1.0:
        raise ConfigError(f"--headroom must be in [0, 1), found {arguments.headroom}. Correct it.")
    memory_bytes = hardware.memory_bytes
    if arguments.gpu_memory_gb is not None:
        memory_bytes = arguments.gpu_memory_gb * 1e9
    if not 0 < memory_bytes < math.inf:
        raise ConfigError(
            f"--gpu-memory-gb must be a positive number, found {arguments.gpu_memory_gb}. Correct it."
        )
    return float(memory_bytes * (1.0 - arguments.headroom))


def _comparison(
    found: Search, best: Evaluation, workload: Workload, limit_bytes: float, max_tensor: int
) -> Sequence[str]:
    """Gain over data-blind use of the same GPUs."""
    stages = StageTable(workload)
    others = {
        "data-blind DeepSpeed (split by parameters)": best_blind(found, stages, "parameters", limit_bytes, 1),
        "Megatron-style (equal layers, data-blind)": best_blind(
            found, stages, "uniform", limit_bytes, max_tensor
        ),
    }
    return report.comparison_lines(best, others)


def _payoff(best: Evaluation, workload: Workload, ds_config: dict[str, Any], load_s: float | None) -> str:
    loader_s = None
    if load_s is not None:
        workers = max(1, parse_dflop(ds_config).data.num_workers)
        loader_s = workload.batch_size * load_s / (workers * best.layout.llm.data)
    gain = gain_of_balancing(best, StageTable(workload))
    return report.payoff_line(Payoff(gain, loader_s, best.step_s))


def _print_oversized(workload: Workload, best: Evaluation, limit_bytes: float) -> None:
    rows = oversized_rows(workload, best, limit_bytes)
    if not len(rows):
        print("every sample fits into a microbatch")
        return
    print(f"{len(rows)} samples would not fit, even alone in a microbatch:")
    for row in rows[:_MOST_LISTED].tolist():
        shape = workload.table[row]
        print(f"  {shape.sample_id}: {shape.llm_tokens} tokens, {shape.encoder_inputs} encoder inputs")
    if len(rows) > _MOST_LISTED:
        print(f"  ... and {len(rows) - _MOST_LISTED} more")
