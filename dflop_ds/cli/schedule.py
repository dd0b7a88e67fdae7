"""``dflop-ds schedule``: solve one global batch from files, or audit the plan log of a run."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path

import numpy as np

from dflop_ds.cost.features import MicrobatchFeatures
from dflop_ds.cost.files import read_json
from dflop_ds.cost.model import CostModel, LayerCostModel, SampleCosts
from dflop_ds.cost.split import balanced_split, expected_layer_times
from dflop_ds.errors import ConfigError
from dflop_ds.families import model_dims
from dflop_ds.planning.analytic import model_layers
from dflop_ds.profiling.table import ProfileTable
from dflop_ds.scheduling.assignment import imbalance
from dflop_ds.scheduling.plan_log import audit, read_plan_log
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.schedule import Effort, Schedule, schedule
from dflop_ds.scheduling.solve import POLICIES
from dflop_ds.shapes import ShapeTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("--audit", type=Path, metavar="FILE", help="check this plan log and stop")
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="shapes of the batch (NPZ)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="profile from `dflop-ds profile model`")
    parser.add_argument("--model", type=Path, metavar="FILE", help="the model's config.json")
    parser.add_argument("--num-replicas", type=int, default=1, metavar="R", help="default: 1")
    parser.add_argument("--num-microbatches", type=int, metavar="M", help="per replica")
    parser.add_argument("--num-stages", type=int, default=1, metavar="P", help="pipeline stages; default: 1")
    parser.add_argument("--num-samples", type=int, metavar="N", help="first N samples; default: all")
    parser.add_argument("--max-tokens", type=int, metavar="T", help="cap of LLM tokens in one microbatch")
    parser.add_argument("--max-encoder-inputs", type=int, metavar="T", help="cap of tiles, frames or patches")
    parser.add_argument("--policy", choices=POLICIES, default="cp_sat", help="default: cp_sat")
    parser.add_argument("--time-limit-s", type=float, default=1.0, metavar="S", help="default: 1")
    parser.add_argument("--num-workers", type=int, default=1, metavar="W", help="default: 1")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Solve and print before and after, or audit."""
    if arguments.audit is not None:
        return _audit(arguments.audit)
    needed = ("shapes", "profile", "model", "num_microbatches")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(arguments, name) is None]
    if missing:
        raise ConfigError(f"a batch needs {', '.join(missing)}; found none. Give them, or use --audit FILE.")
    table = ShapeTable.load(arguments.shapes)
    if arguments.num_samples is not None:
        table = table.take(np.arange(min(arguments.num_samples, len(table))))
    costs = sample_costs(table, arguments)
    problem = _problem(table, costs, arguments)
    effort = Effort(
        policy=arguments.policy,
        deterministic_time_s=arguments.time_limit_s,
        seed=arguments.seed,
        num_workers=arguments.num_workers,
    )
    blind = schedule(
        Problem(problem.costs_s, problem.num_replicas, problem.num_microbatches),
        costs.forward_s,
        costs.backward_s,
        dataclasses.replace(effort, policy="blind"),
    )
    found = schedule(problem, costs.forward_s, costs.backward_s, effort)
    _print(problem, blind, found)
    return 0


def sample_costs(table: ShapeTable, arguments: argparse.Namespace) -> SampleCosts:
    """Predicted seconds of every sample in every stage of the pipeline that the profile balances."""
    config = read_json(arguments.model, "model config")
    dims = model_dims(config)
    layers = model_layers(dims)
    profile = ProfileTable.load(arguments.profile)
    profile.check_model(config, layers)
    model = LayerCostModel().fit(profile.rows, dims)
    num_bins = max(1, arguments.num_replicas * arguments.num_microbatches)
    bins = [part.tolist() for part in np.array_split(np.arange(len(table)), num_bins) if len(part)]
    times_s = expected_layer_times(model, layers, MicrobatchFeatures.from_bins(table, bins))
    edges = balanced_split(layers, times_s, arguments.num_stages)
    stages = [layers[start:end] for start, end in itertools.pairwise(edges)]
    return CostModel(model, stages).sample_costs(table, samples_per_bin=max(1.0, len(table) / num_bins))


def _problem(table: ShapeTable, costs: SampleCosts, arguments: argparse.Namespace) -> Problem:
    limits = {
        "tokens": (table.llm_tokens, arguments.max_tokens),
        "encoder inputs": (table.encoder_inputs, arguments.max_encoder_inputs),
    }
    used = {name: limit for name, limit in limits.items() if limit[1] is not None}
    sizes = [column for column, _ in used.values()]
    return Problem(
        costs.forward_s + costs.backward_s,
        arguments.num_replicas,
        arguments.num_microbatches,
        sizes=np.stack(sizes, axis=1) if sizes else np.zeros((len(table), 0), dtype=np.int64),
        caps=np.array([cap for _, cap in used.values()], dtype=np.int64),
        cap_names=tuple(used),
        sample_ids=tuple(table.sample_ids),
    )


def _print(problem: Problem, blind: Schedule, found: Schedule) -> None:
    print(
        f"{problem.num_samples} samples, {problem.num_replicas} replicas x {problem.num_microbatches} "
        f"microbatches, {problem.num_modules} stages; predicted times, simulated 1F1B step"
    )
    print(f"{'':<14}{'step s':>12}{'max/mean bin':>14}")
    for name, one in (("data-blind", blind), ("data-aware", found)):
        print(f"{name:<14}{one.makespan_s:>12.6g}{imbalance(problem, one.assignment):>14.4f}")
    solution = found.solution
    shape = "equal bins" if len(set(found.weights)) == 1 else f"ramp {[round(w, 2) for w in found.weights]}"
    print(
        f"solver {solution.solver}, {shape}: largest bin {solution.largest_bin_s:.6g} s, lower bound "
        f"{solution.bound_s:.6g} s, gap {solution.ratio_to_bound - 1.0:.4%}, {solution.solve_time_s:.3f} s"
    )
    if len(set(found.weights)) > 1:
        print("bins of a ramp are unequal on purpose: small ones fill and drain the pipeline faster")
    if solution.fallback_reason is not None:
        print(f"fallback: {solution.fallback_reason}")
    saved = 1.0 - found.makespan_s / blind.makespan_s if blind.makespan_s > 0 else 0.0
    print(f"predicted saving: {saved:.1%} of the data-blind step")


def _audit(path: Path) -> int:
    result = audit(read_plan_log(path))
    print(
        f"{result.num_steps} steps, {result.num_samples} samples, {result.num_fallbacks} fallbacks, "
        f"{result.num_kept_blind} kept data-blind"
    )
    if result.measured_s > 0:
        print(f"measured steps: predicted {result.predicted_s:.4g} s, measured {result.measured_s:.4g} s")
    for problem in result.problems:
        print(f"FAIL {problem}")
    print("ok" if not result.problems else f"{len(result.problems)} problems")
    return 1 if result.problems else 0
