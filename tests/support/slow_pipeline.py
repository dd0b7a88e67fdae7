"""A slow simulation of whole steps: every rank is a program of instructions, run one at a time."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np

from dflop_ds.simulation.schedule import Kind, one_f_one_b

_SENDS = {Kind.SEND_ACTIVATION: ("activation", 1), Kind.SEND_GRAD: ("gradient", -1)}
_RECEIVES = {Kind.RECV_ACTIVATION: ("activation", -1), Kind.RECV_GRAD: ("gradient", 1)}
_PASSES = (Kind.FORWARD_PASS, Kind.BACKWARD_PASS)
_PASS_OF = dict(zip(_SENDS, _PASSES, strict=True))


class SlowStep:
    """One step of modules, each a pair (forward, backward) of shape (replicas, stages, microbatches).

    ``wire_s[edge]`` has the shape (super-replicas, lanes before the edge, microbatches), for both directions.
    """

    def __init__(
        self, modules: list[tuple[Any, Any]], wire_s: Any, latency_s: list[float], rendezvous: bool
    ) -> None:
        self.modules = modules
        self.supers = math.gcd(*(len(forward) for forward, _ in modules))
        self.first, self.num_stages = [], 0
        for forward, _ in modules:
            self.first.append(self.num_stages)
            self.num_stages += forward.shape[1]
        self.num_microbatches = modules[0][0].shape[2]
        self.wire_s, self.latency_s, self.rendezvous = wire_s, latency_s, rendezvous
        self.now = {rank: 0.0 for rank in self.ranks()}
        self.position = dict.fromkeys(self.now, 0)
        self.programs = {rank: self.program(rank[0]) for rank in self.now}
        self.arrived: dict[Any, float] = {}
        self.link_free: collections.defaultdict[Any, float] = collections.defaultdict(float)
        self.passes: dict[Any, tuple[float, float]] = {}
        while any(self.position[rank] < len(self.programs[rank]) for rank in self.now):
            if not any([self.advance(rank) for rank in self.now]):
                raise AssertionError("deadlock")

    def program(self, stage: int) -> list[Any]:
        """Instructions of a stage; sends that do not block leave at the end of their pass."""
        slots = one_f_one_b(self.num_stages, stage, self.num_microbatches)
        program = [each for slot in slots for each in slot if each.kind in {*_SENDS, *_RECEIVES, *_PASSES}]
        if self.rendezvous:
            return program
        sends = {(_PASS_OF[each.kind], each.microbatch): each for each in program if each.kind in _SENDS}
        ordered = []
        for each in program:
            if each.kind not in _SENDS:
                ordered += [each, *([sends[key]] if (key := (each.kind, each.microbatch)) in sends else [])]
        return ordered

    def module(self, stage: int) -> int:
        return max(index for index, first in enumerate(self.first) if first <= stage)

    def lanes(self, stage: int) -> int:
        return len(self.modules[self.module(stage)][0]) // self.supers

    def ranks(self) -> list[tuple[int, int, int]]:
        """(stage, super-replica, lane)."""
        return [
            (stage, group, lane)
            for stage in range(self.num_stages)
            for group in range(self.supers)
            for lane in range(self.lanes(stage))
        ]

    def peers(self, rank: tuple[int, int, int], stage: int) -> list[tuple[int, int, int]]:
        """Whom a rank talks to at a neighbour stage: its own lane, or all lanes across a border."""
        if self.module(rank[0]) == self.module(stage) or self.lanes(rank[0]) == self.lanes(stage) == 1:
            return [(stage, rank[1], rank[2])]
        return [(stage, rank[1], lane) for lane in range(self.lanes(stage))]

    def wire(self, rank: tuple[int, int, int], stage: int, microbatch: int) -> float:
        edge = min(rank[0], stage)
        return float(self.wire_s[edge][rank[1], rank[2] % self.wire_s[edge].shape[1], microbatch])

    def advance(self, rank: tuple[int, int, int]) -> bool:
        if self.position[rank] == len(self.programs[rank]):
            return False
        each = self.programs[rank][self.position[rank]]
        return self.meet(rank, each) if self.rendezvous else self.pass_on(rank, each)

    def compute(self, rank: tuple[int, int, int], each: Any) -> bool:
        stage, group, lane = rank
        forward, backward = self.modules[self.module(stage)]
        times = forward if each.kind is Kind.FORWARD_PASS else backward
        replica = group * self.lanes(stage) + lane
        duration = float(times[replica, stage - self.first[self.module(stage)], each.microbatch])
        self.passes[each.kind, stage, replica, each.microbatch] = (self.now[rank], self.now[rank] + duration)
        self.now[rank] += duration
        self.position[rank] += 1
        return True

    def pass_on(self, rank: tuple[int, int, int], each: Any) -> bool:
        """Sends never block; a link carries one message of a direction at a time."""
        if each.kind in _SENDS:
            what, step = _SENDS[each.kind]
            for peer in self.peers(rank, rank[0] + step):
                link = (what, rank, peer)
                end = max(self.now[rank], self.link_free[link]) + self.wire(rank, peer[0], each.microbatch)
                self.link_free[link] = end
                self.arrived[what, rank, peer, each.microbatch] = end + self.latency_s[min(rank[0], peer[0])]
        elif each.kind in _RECEIVES:
            what, step = _RECEIVES[each.kind]
            keys = [(what, peer, rank, each.microbatch) for peer in self.peers(rank, rank[0] + step)]
            if not all(key in self.arrived for key in keys):
                return False
            self.now[rank] = max([self.now[rank], *(self.arrived[key] for key in keys)])
        else:
            return self.compute(rank, each)
        self.position[rank] += 1
        return True

    def meet(self, rank: tuple[int, int, int], each: Any) -> bool:
        """A transfer begins when all its senders and receivers have come to it, and ends for all at once."""
        if each.kind not in _SENDS and each.kind not in _RECEIVES:
            return self.compute(rank, each)
        what, step = (_SENDS | _RECEIVES)[each.kind]
        there = self.peers(rank, rank[0] + step)
        here = self.peers(there[0], rank[0])
        for other in here + there:
            at = self.programs[other][self.position[other]]
            if (_SENDS | _RECEIVES).get(at.kind, (None,))[0] != what or at.microbatch != each.microbatch:
                return False
            if other in there and (at.kind in _SENDS) == (each.kind in _SENDS):
                return False
        end = max(self.now[other] for other in here + there)
        end += self.wire(rank, there[0][0], each.microbatch) + self.latency_s[min(rank[0], there[0][0])]
        for other in here + there:
            self.now[other] = end
            self.position[other] += 1
        return True

    @property
    def makespan_s(self) -> float:
        return max(end for (kind, *_), (_, end) in self.passes.items() if kind is Kind.BACKWARD_PASS)

    def ready_s(self) -> np.ndarray:
        """When the last replica of each stage has done everything."""
        stages = range(self.num_stages)
        return np.array([max(self.now[rank] for rank in self.now if rank[0] == stage) for stage in stages])
