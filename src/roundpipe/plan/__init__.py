"""Plans: the records, the rules, the simulator and the planner. Numbers in, plan out."""

from roundpipe.plan.execute_plan import ModelExecutePlan, default_plan

__all__ = ["ModelExecutePlan", "default_plan"]
