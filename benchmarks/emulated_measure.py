"""What the ranks of the emulated cluster measured, the simulation of the same steps, and its calibration."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.emulated_times import EmulatedModel
from dflop_ds.cost.features import FloatArray
from dflop_ds.scheduling.plan_log import read_plan_log
from dflop_ds.simulation.network import Link
from dflop_ds.simulation.step import StepResult, simulate_steps
from dflop_ds.simulation.work import ModuleWork, Network, StepEnd

WARMUP_STEPS = 3
CALIBRATION = slice(1, WARMUP_STEPS)
"""Steps that overheads are taken from; the first one also opens connections."""

SPEED_RUNS = 50


@dataclasses.dataclass(frozen=True)
class Layout:
    """Pipeline stages, replicas, and microbatches of one replica in a step."""

    num_stages: int
    num_replicas: int
    num_microbatches: int

    @classmethod
    def parse(cls, text: str, batch_size: int, micro_batch_size: int) -> Layout:
        """From "4x2", stages x replicas."""
        stages, replicas = (int(number) for number in text.split("x"))
        return cls(stages, replicas, batch_size // (micro_batch_size * replicas))

    @property
    def name(self) -> str:
        """Such as "4x2"."""
        return f"{self.num_stages}x{self.num_replicas}"


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """What one run measured; arrays over all steps, warm-up included.

    Attributes
    ----------
    label : str
    step_s : ndarray, shape (num_steps,)
        Slowest rank, from a barrier to the end of ``train_batch``.
    makespan_s : ndarray, shape (num_steps,)
        First forward to last backward over all ranks.
    forward_s, backward_s : ndarray, shape (num_steps, num_replicas, num_stages, num_microbatches)
        How long the layers were to wait.
    excess_s : tuple of float
        Mean seconds that a forward, and a backward, took beyond that in the calibration steps.
    bubble : ndarray, shape (num_steps,)
        Measured share of the makespan in which ranks neither ran a forward nor a backward.
    """

    label: str
    step_s: FloatArray
    makespan_s: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    excess_s: tuple[float, float]
    bubble: FloatArray

    @classmethod
    def read(cls, job: dict[str, Any], ranks: list[Any], model: EmulatedModel, layout: Layout) -> Measured:
        """Put together what all ranks wrote of one run."""
        own = [rank[job["label"]] for rank in ranks]
        bins = job["bins"] or [
            [step.plan.replica_bins(replica) for replica in range(layout.num_replicas)]
            for step in read_plan_log(job["plan_log"])
        ]
        bins = bins[: len(own[0]["step_times_s"])]
        waits = [waits_s(step, model, layout) for step in bins]
        forward_s, backward_s = (np.stack([pair[which] for pair in waits]) for which in (0, 1))
        step_s = np.max([rank["step_times_s"] for rank in own], axis=0)
        took = {name: passes(own, name, forward_s.shape) for name in ("ForwardPass", "BackwardPass")}
        makespan_s = took["BackwardPass"][1].max(axis=(1, 2, 3)) - took["ForwardPass"][0].min(axis=(1, 2, 3))
        busy_s = sum((stop_s - start_s).sum(axis=(1, 2, 3)) for start_s, stop_s in took.values())
        extra = [
            float((stop_s - start_s - wait_s)[CALIBRATION].mean())
            for (start_s, stop_s), wait_s in zip(took.values(), (forward_s, backward_s), strict=True)
        ]
        bubble = 1.0 - busy_s / (len(own) * makespan_s)
        return cls(job["label"], step_s, makespan_s, forward_s, backward_s, (extra[0], extra[1]), bubble)


def waits_s(step: Any, model: EmulatedModel, layout: Layout) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds of one step, shape (num_replicas, num_stages, num_microbatches)."""
    boundaries = model.boundaries(layout.num_stages)
    replicas = [model.bin_times_s(members, boundaries) for members in step]
    forward_s, backward_s = (np.stack([pair[which].T for pair in replicas]) for which in (0, 1))
    return forward_s, backward_s


def passes(own: list[Any], name: str, shape: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """Start and end of every pass of one kind on the clock that the ranks of a machine share."""
    start_s, stop_s = np.zeros(shape), np.zeros(shape)
    for rank in own:
        for number, step in enumerate(rank["steps"]):
            rows = [each for each in step["instructions"] if each["name"] == name]
            at = (number, rank["replica"], rank["stage"])
            start_s[at] = [step["start_s"] + each["start_s"] for each in rows]
            stop_s[at] = start_s[at] + [each["duration_s"] for each in rows]
    return start_s, stop_s


@dataclasses.dataclass(frozen=True)
class Overheads:
    """What the emulation adds to the waits, seconds.

    Attributes
    ----------
    forward_s, backward_s : float
        Per pass: Python of the layers, oversleeping.
    transfer_s : float
        Per message between two stages, which holds both.
    step_s : float
        Per step: loading, reduction, optimizer, loss.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    transfer_s: float = 0.0
    step_s: float = 0.0


def simulate(run: Measured, overheads: Overheads) -> StepResult:
    """Simulate all steps of a run from its waits alone."""
    work = ModuleWork(run.forward_s + overheads.forward_s, run.backward_s + overheads.backward_s)
    # gloo returns from a send when the receiver has taken the message.
    network = Network(Link(overheads.transfer_s), "rendezvous")
    return simulate_steps(work, network=network, end=StepEnd(fixed_s=overheads.step_s))


def calibrate(run: Measured) -> Overheads:
    """Overheads from the calibration steps of one run.

    Those of the passes and of the step are measured; that of a transfer is the one with which the simulated
    makespans of these steps add up to the measured ones.
    """
    known = Overheads(
        forward_s=max(0.0, run.excess_s[0]),
        backward_s=max(0.0, run.excess_s[1]),
        step_s=max(0.0, float((run.step_s - run.makespan_s)[CALIBRATION].mean())),
    )
    low_s, high_s = 0.0, 0.1
    for _ in range(40):
        middle_s = (low_s + high_s) / 2
        tried = simulate(run, dataclasses.replace(known, transfer_s=middle_s))
        if float(tried.makespan_s[CALIBRATION].sum()) < float(run.makespan_s[CALIBRATION].sum()):
            low_s = middle_s
        else:
            high_s = middle_s
    return dataclasses.replace(known, transfer_s=low_s)


def simulated_steps_per_s(seed: int) -> float:
    """Measured speed of the simulator, one step a call: 8 stages, 32 microbatches, 4 replicas, one core."""
    rng = np.random.default_rng(seed)
    forward_s, backward_s, sizes = rng.exponential(1.0, (3, 1, 4, 8, 32))
    work, network = ModuleWork(forward_s, backward_s, sizes), Network(Link(1e-3, 10.0), "rendezvous")
    simulate_steps(work, network=network)
    times_s = []
    for _ in range(SPEED_RUNS):
        start_s = time.perf_counter()
        simulate_steps(work, network=network)
        times_s.append(time.perf_counter() - start_s)
    return 1.0 / statistics.median(times_s)
