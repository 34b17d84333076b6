"""Plans: records, rules, the simulator and the planner. Numbers in, plan out.

A walk through it: costs of layers and devices (``costs``) make a workload with limits
(``workload``). Its plans (``space``) are timed on a clock of pure arithmetic (``clock``,
``iterations``) and searched (``seeds``, ``search``, ``planner``). What a plan does over time is a
timeline (``simulate``, ``timeline``), which is accounted for (``bubbles``) and put into words
(``explain``, ``report``).
"""

from roundpipe.plan.bubbles import BubbleAccount, account_of
from roundpipe.plan.costs import DeviceSpec, LayerCost, LayerCosts, Machine
from roundpipe.plan.execute_plan import (
    MODEL_SHARE_OF_MEMORY,
    ModelExecutePlan,
    Plannable,
    default_plan,
)
from roundpipe.plan.explain import Explanation, explain
from roundpipe.plan.planner import Planned, plan_iteration, plan_models
from roundpipe.plan.simulate import Simulation, simulate
from roundpipe.plan.stage_plan import StagePlan
from roundpipe.plan.timeline import Span, Timeline, render_timeline
from roundpipe.plan.workload import ENGINE_RULES, EngineRules, PlanLimits, Workload

__all__ = [
    "ENGINE_RULES",
    "MODEL_SHARE_OF_MEMORY",
    "BubbleAccount",
    "DeviceSpec",
    "EngineRules",
    "Explanation",
    "LayerCost",
    "LayerCosts",
    "Machine",
    "ModelExecutePlan",
    "PlanLimits",
    "Plannable",
    "Planned",
    "Simulation",
    "Span",
    "StagePlan",
    "Timeline",
    "Workload",
    "account_of",
    "default_plan",
    "explain",
    "plan_iteration",
    "plan_models",
    "render_timeline",
    "simulate",
]
