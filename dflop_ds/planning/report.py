"""A finished search in words and columns, one line each."""

from __future__ import annotations

from dflop_ds.planning.advice import Payoff
from dflop_ds.planning.evaluation import Evaluation
from dflop_ds.planning.search import Search
from dflop_ds.planning.workload import Workload

_SHOWN_STAGES = 8


def ranking_lines(found: Search, workload: Workload, num_rows: int) -> list[str]:
    """The fastest layouts, with what each loses to the first."""
    lines = [
        "tp: tensor degree, pp: stages, dp: replicas, m: microbatches of a replica, ckpt: checkpointing",
        f"{'':>3}{'layout':<46}{'step s':>9}{'tokens/s/GPU':>14}{'idle':>7}{'largest GB':>12}  lost by",
    ]
    best = found.ranking[0]
    for place, each in enumerate(found.ranking[:num_rows], start=1):
        rate = workload.tokens_per_step / each.step_s / each.layout.num_gpus
        lines.append(
            f"{place:>2} {each.layout!s:<46}{each.step_s:>9.4g}{rate:>14.0f}{each.bubble_fraction:>7.1%}"
            f"{each.peak_bytes / 1e9:>12.1f}  {'' if place == 1 else reason(best, each)}"
        )
    return lines


def reason(best: Evaluation, other: Evaluation) -> str:
    """Why a layout is slower, or else why it was ranked behind."""
    parts = {
        "more compute per GPU": other.busy_s - best.busy_s,
        "more waiting": other.idle_s - best.idle_s,
        "slower reduction and update": other.end_s - best.end_s,
    }
    name = max(parts, key=lambda key: parts[key])
    if other.step_s <= best.step_s * (1.0 + 1e-12):
        return f"equally fast, {(other.peak_bytes - best.peak_bytes) / 1e9:+.1f} GB"
    return f"{name} ({parts[name]:+.3g} s)"


def plan_lines(plan: Evaluation, workload: Workload, limit_bytes: float) -> list[str]:
    """The chosen layout in detail."""
    layout = plan.layout
    replicas = layout.llm.data * layout.num_microbatches
    lines = [
        f"chosen: {layout}, {workload.batch_size} samples a step = {layout.llm.data} replicas x "
        f"{layout.num_microbatches} microbatches x {workload.batch_size / replicas:g} samples",
        f"{'stage':<7}{'layers':>8}{'GB':>8}  of which weights and state, activations and buffers (limit "
        f"{limit_bytes / 1e9:.1f} GB)",
    ]
    for stage, (size, memory) in enumerate(zip(plan.sizes, plan.memory, strict=True)):
        if stage == _SHOWN_STAGES and len(plan.sizes) > _SHOWN_STAGES + 1:
            lines.append(f"...    {len(plan.sizes) - stage} more stages")
            break
        state, kept = memory.state_bytes, memory.total_bytes - memory.state_bytes
        lines.append(
            f"{stage:<7}{size:>8}{memory.total_bytes / 1e9:>8.2f}  {state / 1e9:.2f}, {kept / 1e9:.2f}"
        )
    return lines


def comparison_lines(plan: Evaluation, others: dict[str, Evaluation | None]) -> list[str]:
    """Expected gain over other ways to use the same GPUs."""
    lines = []
    for name, other in others.items():
        if other is None:
            lines.append(f"{name}: no such layout fits")
        else:
            ratio = other.step_s / plan.step_s
            lines.append(
                f"{name}: {other.step_s:.4g} s ({other.layout}), the plan is "
                f"{ratio:.2f}x {'faster' if ratio >= 1.0 else 'as fast'}"
            )
    return lines


def search_line(found: Search) -> str:
    """How the search went."""
    proof = (
        "no layout of this space can be faster"
        if found.proven
        else f"not proven: a layout that was not simulated could take {found.bound_s:.4g} s at best"
    )
    return (
        f"{found.num_candidates} layouts scored in {found.scoring_s * 1e3:.0f} ms, {found.num_simulated} "
        f"scheduled and simulated in {found.simulation_s:.1f} s; {proof}"
    )


def payoff_line(payoff: Payoff) -> str:
    """Whether balancing pays."""
    unknown = "" if payoff.loader_s is not None else " (loader not measured: --load-s)"
    return payoff.verdict + unknown
