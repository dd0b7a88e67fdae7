"""Plans for every rank: made ahead of time on rank 0, broadcast, checked, queued."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from deepspeed import comm as dist

from dflop_ds.data.stream import StreamRecords
from dflop_ds.errors import DflopError, PlanError
from dflop_ds.runtime import distributed
from dflop_ds.runtime.adaptive import AdaptivePlanner
from dflop_ds.runtime.stop import StopRequest
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.planner import PlannedStep, StepPlanner
from dflop_ds.scheduling.process import SolverProcess
from dflop_ds.scheduling.service import PlanService
from dflop_ds.scheduling.windows import StreamPlanner

logger = logging.getLogger(__name__)

_STARTUP_S = 20.0
_LEAST_HANG_S = 30.0
_HANG_DEADLINES = 20.0


@dataclasses.dataclass
class FeedStats:
    """What planning cost this rank.

    Attributes
    ----------
    num_steps : int
        Steps handed to the engine.
    exposed_s : float
        Seconds for which training waited for a plan or its broadcast.
    num_fallbacks : int
        Plans made by LPT because the solver was late or failed (rank 0).
    """

    num_steps: int = 0
    exposed_s: float = 0.0
    num_fallbacks: int = 0


class PlanFeed:
    """Hands out one plan per optimizer step, the same on every rank.

    Every rank must call :meth:`next_step` before a step and :meth:`advance` after it: the latter broadcasts
    the plan that lies ``lookahead`` steps ahead, so that data workers can load its samples in time, and
    with it whether training is to stop.

    Parameters
    ----------
    planner : StepPlanner, AdaptivePlanner, StreamPlanner or None
        Needed on rank 0 only.
    lookahead : int
        Steps between the broadcast of a plan and its use.
    deadline_s : float
        How long rank 0 waits for its solver before it falls back to LPT.
    replica : int
        Data-parallel replica of this rank.
    on_plan : callable, optional
        Told of every plan on rank 0, in the order of the steps.
    in_process : bool
        Let rank 0 solve in a process of its own where the policy is "cp_sat", not in a thread; a stream is
        planned in a thread.
    records : StreamRecords, optional
        Stream that this rank draws its samples from; it learns of every plan.
    """

    def __init__(
        self,
        planner: StepPlanner | AdaptivePlanner | StreamPlanner | None,
        *,
        lookahead: int,
        deadline_s: float,
        replica: int,
        on_plan: Callable[[PlannedStep], None] | None = None,
        in_process: bool = False,
        records: StreamRecords | None = None,
    ) -> None:
        self.lookahead = lookahead
        self.replica = replica
        self.stats = FeedStats()
        self.stop = StopRequest()
        self.stopping = False
        self.solver: SolverProcess | None = None
        self._planner = planner if dist.get_rank() == 0 else None
        self._deadline_s = deadline_s
        self._on_plan = on_plan
        self._in_process = in_process
        self._records = records
        self._service: PlanService[PlannedStep] | None = None
        self._said_blind = False
        self._next_broadcast = 0
        self._plans: collections.deque[StepPlan] = collections.deque()
        self._bins: collections.deque[tuple[int, ...]] = collections.deque()
        self._start_service()

    @property
    def step(self) -> int:
        """Number of the next step: how many have been handed out since training began."""
        return self._next_broadcast - len(self._plans)

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """Plans that are made and not yet handed out."""
        return tuple(self._plans)

    def next_step(self) -> StepPlan:
        """Plan of the next optimizer step; a collective call where it is not known yet."""
        start_s = time.perf_counter()
        self._fill()
        self.stats.num_steps += 1
        self.stats.exposed_s += time.perf_counter() - start_s
        return self._plans.popleft()

    def advance(self) -> None:
        """Learn the plan that the next step needs, and whether to stop; a collective call."""
        start_s = time.perf_counter()
        self.stop.publish()
        self._fill()
        self.stats.exposed_s += time.perf_counter() - start_s

    def agree_to_stop(self) -> bool:
        """Learn between two steps whether to stop; a collective call."""
        self.stopping = self.stop.agree() or self.stopping
        return self.stopping

    def go_to(self, step: int, plans: Sequence[StepPlan]) -> None:
        """Go on from another step.

        Parameters
        ----------
        step : int
            The next one to hand out.
        plans : sequence of StepPlan
            Its plan and the ones after it, as far as they are known already; the same on every rank.
        """
        self.close()
        self._plans = collections.deque(plans)
        self._bins = collections.deque(
            members for plan in plans for members in plan.replica_bins(self.replica)
        )
        for plan in plans:
            self._tell_records(plan)
        self._next_broadcast = step + len(self._plans)
        self._start_service()

    def bins(self) -> Iterator[list[Any]]:
        """Data set indices (or numbers and records of a stream) of this replica's microbatches, without end.

        Raises
        ------
        PlanError
            If more microbatches are drawn than have been planned.
        """
        while True:
            if not self._bins:
                raise PlanError(
                    "a microbatch was drawn before its step was planned; call engine.train_batch() once per "
                    "step on every rank, or raise dflop.scheduler.lookahead above the data workers' prefetch."
                )
            yield self.drawn(self._bins.popleft())

    @property
    def num_fallbacks(self) -> int:
        """Plans made by LPT because the solver was late or failed (rank 0)."""
        return self.stats.num_fallbacks

    @property
    def background_s(self) -> float:
        """Seconds that rank 0 planned beside training."""
        return 0.0 if self._service is None else self._service.background_s

    def close(self) -> None:
        """Stop planning; harmless when called again."""
        if self.solver is not None:
            self.solver.close()
        if self._service is not None:
            self._service.close()

    def _start_service(self) -> None:
        """Plan in the background from the next step that has no plan (rank 0)."""
        planner = self._planner
        if planner is None:
            return
        # Costs that change while training runs stay in this process.
        if self._in_process and isinstance(planner, StepPlanner) and planner.policy == "cp_sat":
            hang_after_s = max(_LEAST_HANG_S, _HANG_DEADLINES * self._deadline_s)
            self.solver = SolverProcess(planner, hang_after_s=hang_after_s)
            self.solver.start()
        self._service = PlanService(
            planner.plan if self.solver is None else self.solver.plan,
            planner.fallback,
            lookahead=self.lookahead + 1,
            deadline_s=self._deadline_s,
            first_step=self._next_broadcast,
            startup_s=0.0 if self.solver is None else _STARTUP_S,
        )

    def _fill(self) -> None:
        while len(self._plans) <= self.lookahead:
            self._receive()

    def _receive(self) -> None:
        step = self._next_broadcast
        message = np.frombuffer(distributed.on_first_rank(lambda: self._make(step)), dtype=np.int64)
        plan = StepPlan.decode(message[1:])
        if plan.step != step:
            raise PlanError(
                f"the next plan must be for step {step}, found step {plan.step}; ranks are out of step."
            )
        self.stopping = self.stopping or bool(message[0])
        self._next_broadcast += 1
        self._plans.append(plan)
        self._bins.extend(plan.replica_bins(self.replica))
        self._tell_records(plan)

    def _tell_records(self, plan: StepPlan) -> None:
        if self._records is None:
            return
        own = {number for members in plan.replica_bins(self.replica) for number in members}
        everyone = {number for members in plan.bins for number in members}
        self._records.planned(plan.epoch, own, everyone - own)

    def drawn(self, members: Iterable[int]) -> list[Any]:
        """What the data set is asked for: the indices, or records of a stream."""
        return [number if self._records is None else self._records.draw(number) for number in members]

    def _make(self, step: int) -> bytes:
        if self._service is None:
            raise DflopError("rank 0 must own the planner; pass training_data on every rank.")
        result = self._service.get(step)
        if result.fallback_reason is not None:
            self.stats.num_fallbacks += 1
            logger.warning("step %d is planned by LPT: %s", step, result.fallback_reason)
        if result.value.kept_blind and not self._said_blind:
            self._said_blind = True
            logger.info(
                "step %d keeps the data-blind order, as little is gained by another "
                "(dflop.scheduler.min_gain); further such steps are in the plan log only",
                step,
            )
        if self._on_plan is not None:
            self._on_plan(result.value)
        stop = np.array([self.stop.seen()], dtype=np.int64)
        return np.concatenate([stop, result.value.plan.encode()]).tobytes()
