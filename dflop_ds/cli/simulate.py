"""``dflop-ds simulate``: what a training configuration will do, step by step, from files alone."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path

import numpy as np

from dflop_ds.cli.arguments import check_writable, whole_number
from dflop_ds.cli.timeline import draw_timeline
from dflop_ds.cli.training import measured_costs, read_model_config
from dflop_ds.config import BATCH_KEYS, BatchSizes, load_ds_config, parse_dflop, zero_stage
from dflop_ds.cost.features import FloatArray
from dflop_ds.cost.memory import TrainingSetting
from dflop_ds.cost.split import configured_boundaries
from dflop_ds.errors import ConfigError
from dflop_ds.planning import communication
from dflop_ds.planning.hardware import PRESETS, load_hardware
from dflop_ds.planning.layout import Degrees, Layout
from dflop_ds.planning.what_if import SimulatedStep, WhatIf
from dflop_ds.profiling.table import ProfileTable
from dflop_ds.scheduling.plan_log import LoggedStep, read_plan_log
from dflop_ds.scheduling.solve import POLICIES
from dflop_ds.shapes import ShapeTable
from dflop_ds.simulation.critical import critical_path
from dflop_ds.simulation.network import Link
from dflop_ds.simulation.step import StepResult
from dflop_ds.simulation.trace import TraceEvent, step_events, write_trace
from dflop_ds.simulation.work import Network, StepEnd

_PASSES = {"ForwardPass": "forward", "BackwardPass": "backward"}
_NUM_CULPRITS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="DeepSpeed JSON with a dflop block")
    parser.add_argument("--shapes", type=Path, required=True, metavar="FILE", help="shapes of the data (NPZ)")
    parser.add_argument(
        "--profile", type=Path, required=True, metavar="FILE", help="profile from `dflop-ds profile model`"
    )
    parser.add_argument("--model", type=Path, metavar="FILE", help="config.json; default: dflop.model.path")
    parser.add_argument(
        "--steps", type=whole_number(1), default=8, metavar="N", help="steps to simulate; default: 8"
    )
    parser.add_argument(
        "--num-replicas", type=whole_number(1), metavar="R", help="default: by the batch sizes of PLAN"
    )
    parser.add_argument("--policy", choices=POLICIES, help="instead of dflop.scheduler.policy")
    parser.add_argument(
        "--hardware",
        metavar="H",
        help=f"{', '.join(PRESETS)} or a JSON file: links, reduction, optimizer; default: they take no time",
    )
    parser.add_argument("--latency-us", type=float, metavar="US", help="of a message, instead of H")
    parser.add_argument("--bandwidth-gb-s", type=float, metavar="B", help="of a link in GB/s, instead of H")
    parser.add_argument("--overlapped-sends", action="store_true", help="senders do not wait; DeepSpeed's do")
    parser.add_argument(
        "--plan-log", type=Path, metavar="FILE", help="simulate its steps, beside what it measured"
    )
    parser.add_argument(
        "--trace-step", type=whole_number(0), default=0, metavar="K", help="which of the N; default: 0"
    )
    parser.add_argument("--trace", type=Path, metavar="OUT", help="write that step for Perfetto (JSON)")
    parser.add_argument("--png", type=Path, metavar="OUT", help="write that step as a picture")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print the tables, write the trace and the picture."""
    if arguments.trace_step >= arguments.steps:
        raise ConfigError(
            f"--trace-step must be below --steps, found {arguments.trace_step} and {arguments.steps}. "
            "Correct them."
        )
    for option, path in (("--trace", arguments.trace), ("--png", arguments.png)):
        if path is not None:
            check_writable(path, option)
    log = [] if arguments.plan_log is None else read_plan_log(arguments.plan_log)[: arguments.steps]
    what_if = open_plan(arguments)
    if arguments.plan_log is None:
        steps = [what_if.step(number) for number in range(arguments.steps)]
    else:
        steps = [what_if.logged(step) for step in log]
    _print_steps(what_if, steps, log)
    if steps:
        chosen = min(arguments.trace_step, len(steps) - 1)
        _print_stages(what_if, steps)
        _print_critical_path(what_if, steps[chosen])
        _write(arguments, steps[chosen], log[chosen] if log else None)
    return 0


def open_plan(arguments: argparse.Namespace) -> WhatIf:
    """Read everything that a simulation needs."""
    ds_config = load_ds_config(arguments.plan)
    config = parse_dflop(ds_config)
    if arguments.policy is not None:
        scheduler = config.scheduler.model_copy(update={"policy": arguments.policy})
        config = config.model_copy(update={"scheduler": scheduler})
    num_stages = config.parallel.pipeline_stages
    if not isinstance(num_stages, int):
        raise ConfigError(
            'a simulation needs dflop.parallel.pipeline_stages as a number, found "auto". Set it in the plan.'
        )
    num_replicas = arguments.num_replicas or _implied_replicas(ds_config)
    sizes = BatchSizes.from_ds_config(ds_config, num_replicas)
    table = ShapeTable.load(arguments.shapes)
    profile = ProfileTable.load(arguments.profile)
    if profile.fingerprint.tensor_parallel_degree != 1:
        raise ConfigError(
            "a simulation needs a profile of whole layers, found one of tensor-parallel degree "
            f"{profile.fingerprint.tensor_parallel_degree}. Profile on one GPU."
        )
    if arguments.model is None and config.model.path is None:
        raise ConfigError(
            "the model's config.json must be given; found null in dflop.model.path. Give --model."
        )
    model = measured_costs(ds_config, config, read_model_config(config, arguments.model), {1: profile})
    setting = TrainingSetting(
        model.value_bytes,
        num_replicas,
        zero_stage(ds_config),
        config.parallel.activation_checkpointing,
        model.reduce_bucket_values,
    )
    boundaries = configured_boundaries(
        config, model.layers, num_stages, model.times, table, sizes.micro_batch_size, model.training
    )
    if boundaries is None:
        raise ConfigError(
            f"a simulation needs dflop.parallel.split as a list or as auto, found {config.parallel.split!r}, "
            "which DeepSpeed resolves when it starts. Give the number of layers of each stage."
        )
    trained = [
        model.memory.parameters[kind] * model.training_of(layer).trainable_share
        for layer, kind in enumerate(model.layers)
    ]
    num_trained = [sum(trained[start:stop]) for start, stop in itertools.pairwise(boundaries)]
    links, end = _communication(arguments, setting, np.array(num_trained, dtype=np.float64))
    return WhatIf(
        config,
        sizes,
        num_replicas,
        boundaries=boundaries,
        table=table,
        model=model,
        setting=setting,
        network=Network(links, "overlapped" if arguments.overlapped_sends else "rendezvous"),
        end=end,
    )


def _communication(
    arguments: argparse.Namespace, setting: TrainingSetting, num_trained: FloatArray
) -> tuple[list[Link], StepEnd]:
    """Links between the stages, and what follows the last backward; no time without a description."""
    num_stages = len(num_trained)
    links, end = [Link()] * (num_stages - 1), StepEnd()
    if arguments.hardware is not None:
        hardware = load_hardware(arguments.hardware)
        degrees = Degrees(1, num_stages, setting.data_parallel_size)
        layout = Layout(None, degrees, 1, setting.activation_checkpointing, setting.zero_stage)
        links = communication.stage_links(hardware, layout)
        end = communication.step_end(hardware, layout, num_trained, setting.value_bytes)
    given = {}
    if arguments.latency_us is not None:
        given["latency_s"] = 1e-6 * arguments.latency_us
    if arguments.bandwidth_gb_s is not None:
        given["bandwidth_bytes_per_s"] = 1e9 * arguments.bandwidth_gb_s
    return [dataclasses.replace(link, **given) for link in links], end


def _implied_replicas(ds_config: dict[str, object]) -> int:
    train, micro, steps = (ds_config.get(key) for key in BATCH_KEYS)
    if isinstance(train, int) and isinstance(micro, int) and isinstance(steps, int):
        return max(1, train // (max(1, micro) * max(1, steps)))
    raise ConfigError(
        f"the number of replicas must follow from {', '.join(BATCH_KEYS)}, found not all three of them. "
        "Give --num-replicas."
    )


def _print_steps(what_if: WhatIf, steps: list[SimulatedStep], log: list[LoggedStep]) -> None:
    sizes = what_if.sizes
    print(
        f"PREDICTED steps: {len(what_if.stages)} stages x {what_if.num_replicas} replicas, "
        f"{sizes.num_microbatches} microbatches of {sizes.micro_batch_size} samples on average"
    )
    measured = {
        step.plan.step: max(line["step_time_s"] for line in step.measured) for step in log if step.measured
    }
    head = f"{'step':>5}{'predicted s':>13}{'data-blind s':>14}{'bubble':>9}"
    print(head + (f"{'measured s':>12}{'error':>8}" if measured else ""))
    for step in steps:
        blind = "" if step.blind_s is None else f"{step.blind_s:.4g}"
        line = f"{step.number:>5}{step.step_time_s:>13.4g}{blind:>14}{step.result.bubble_fraction[0]:>9.1%}"
        took_s = measured.get(step.number)
        if took_s is not None:
            line += f"{took_s:>12.4g}{step.step_time_s / took_s - 1.0:>+8.1%}"
        print(line)
    if not steps:
        return
    total_s = sum(step.step_time_s for step in steps)
    rows = [row for step in steps for members in step.bins for row in members]
    rate = float(what_if.table.llm_tokens[rows].sum()) / (len(what_if.stages) * what_if.num_replicas)
    line = f"mean step {total_s / len(steps):.4g} s, {rate / max(total_s, 1e-300):.4g} LLM tokens/s per rank"
    blinds = [step.blind_s for step in steps if step.blind_s is not None]
    if blinds and total_s > 0:
        line += f"; data-blind {np.mean(blinds):.4g} s, {sum(blinds) / total_s:.3f}x"
    print(line)


def _print_stages(what_if: WhatIf, steps: list[SimulatedStep]) -> None:
    found = [step.result.modules[0] for step in steps]
    busy_s = np.mean([each.busy_s[0].mean(axis=0) for each in found], axis=0)
    idle_s = np.mean([each.idle_s[0].mean(axis=0) for each in found], axis=0)
    peaks = np.max([what_if.memory_bytes(step.bins) for step in steps], axis=0) / 1e6
    print(f"\n{'stage':>5}{'layers':>8}{'busy s':>10}{'idle':>8}{'peak memory MB':>21}")
    for stage, layers in enumerate(what_if.stages):
        share = idle_s[stage] / max(busy_s[stage] + idle_s[stage], 1e-300)
        print(f"{stage:>5}{len(layers):>8}{busy_s[stage]:>10.4g}{share:>8.1%}{peaks[stage]:>21.1f}")


def _print_critical_path(what_if: WhatIf, step: SimulatedStep) -> None:
    path = critical_path(step.result)
    print(f"\ncritical path of step {step.number}: microbatches on it that take longer than the average")
    for each in path.culprits[:_NUM_CULPRITS]:
        if each.excess_s <= 0:
            break
        members = step.bins[each.replica * len(step.bins) // what_if.num_replicas + each.microbatch]
        print(
            f"  replica {each.replica} microbatch {each.microbatch}: {each.excess_s:.4g} s longer of "
            f"{each.on_path_s:.4g} s, {len(members)} samples, heaviest {what_if.heaviest_sample(members)}"
        )
    waits = ", ".join(f"{replica}: {wait_s:.4g} s" for (_, replica), wait_s in path.replica_wait_s.items())
    print(f"  replicas wait for the slowest at the reduction: {waits}")


def _write(arguments: argparse.Namespace, step: SimulatedStep, logged: LoggedStep | None) -> None:
    events = step_events(step.result)
    if logged is not None:
        events += measured_events(logged, step.result)
    sources = " and ".join(dict.fromkeys(event.source for event in events))
    title = f"step {step.number} of {arguments.plan.name}, {sources}"
    if arguments.trace is not None:
        write_trace(arguments.trace, events, title=title)
        print(f"wrote {arguments.trace} (ui.perfetto.dev)")
    if arguments.png is not None:
        draw_timeline(arguments.png, events, title)
        print(f"wrote {arguments.png}")


def measured_events(logged: LoggedStep, predicted: StepResult) -> list[TraceEvent]:
    """What the ranks of a plan log measured.

    The ranks of a host share a clock; its first pass is put where it is predicted.
    """
    module = predicted.modules[0]
    events = []
    for host in dict.fromkeys(line.get("host", "") for line in logged.measured):
        lines = [line for line in logged.measured if line.get("host", "") == host and line.get("passes")]
        starts = [(line["start_s"] + each[2], line, each) for line in lines for each in line["passes"]]
        if not starts:
            continue
        first_s, line, (name, index, *_) = min(starts, key=lambda start: start[0])
        starts_s = module.forward_start_s if name == "ForwardPass" else module.backward_start_s
        shift_s = float(starts_s[0, line["replica"], line["stage"], index]) - first_s
        events += [
            TraceEvent(
                f"{_PASSES[name]} {index}",
                line["stage"],
                line["replica"],
                index,
                start_s + shift_s,
                duration_s,
                source="measured",
            )
            for start_s, line, (name, index, _, duration_s) in starts
        ]
    return events
