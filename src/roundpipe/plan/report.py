"""What the commands print: documents for ``--json``, and text."""

from __future__ import annotations

from typing import Any

from roundpipe.plan.bubbles import CAUSES, BubbleAccount
from roundpipe.plan.documents import plan_to_document
from roundpipe.plan.explain import account_of_plan, explain
from roundpipe.plan.planner import Planned
from roundpipe.plan.published import PublishedModel
from roundpipe.plan.simulate import Simulation
from roundpipe.plan.timeline import render_timeline
from roundpipe.plan.workload import Workload


def plan_document(planned: Planned) -> dict[str, Any]:
    """A plan and its predicted time, JSON-ready.

    ``makespan_ms`` is the time of one iteration in the workload's mode: of a single one in
    ``sync`` mode, else the pace of many in a row; ``bubble_pct`` belongs to it.
    """
    return {
        **plan_to_document(planned.plan),
        "microbatches_per_round": planned.microbatches_per_round,
        "bubble_pct": planned.bubble_percent,
        "makespan_ms": planned.iteration_ms,
    }


def plan_text(planned: Planned, published: PublishedModel | None = None, width: int = 100) -> str:
    """The explanation of a plan, and its timeline.

    Args:
        planned: the plan.
        published: what to compare it with.
        width: characters of the timeline.
    """
    lines = [str(explain(planned))]
    if published is not None and planned.workload.mode in ("sync", "async"):
        bubble = published.published_bubble_percent(planned.workload.mode)
        lines.append(f"published: bubble {bubble:.2f}%")
    lines += ["", render_timeline(account_of_plan(planned)[1], width)]
    return "\n".join(lines)


def simulation_document(workload: Workload, simulation: Simulation) -> dict[str, Any]:
    """What a simulation found, JSON-ready: ends of iterations, and the account of all of it."""
    account = simulation.account()
    return {
        "model": workload.costs.name,
        "mode": workload.mode,
        "devices": len(workload.machine),
        "microbatches": workload.microbatches,
        "iteration_ends_ms": list(simulation.ends_ms),
        "makespan_ms": simulation.makespan_ms,
        "bubble_pct": account.bubble_percent,
        "bubble_account_pct": account_document(account),
    }


def simulation_text(workload: Workload, simulation: Simulation, width: int = 100) -> str:
    """What a simulation found, and its timeline."""
    account = simulation.account()
    iterations = len(simulation.ends_ms)
    lines = [
        f"{workload.costs.name}: {iterations} {'iteration' if iterations == 1 else 'iterations'} "
        f"({workload.mode}) in {simulation.makespan_ms:.3f} ms, "
        f"bubble {account.bubble_percent:.2f}%",
        account_text(account),
        "",
        render_timeline(simulation.timeline, width),
    ]
    return "\n".join(lines)


def account_document(account: BubbleAccount) -> dict[str, float]:
    """Shares of the devices' time in percent."""
    shares = {cause: account.percent(cause) for cause in CAUSES}
    return {"busy": 100 - account.bubble_percent, **shares}


def account_text(account: BubbleAccount) -> str:
    """The same as one line."""
    shares = account_document(account)
    return ", ".join(f"{name} {share:.2f}%" for name, share in shares.items() if share >= 0.005)
