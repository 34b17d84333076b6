"""What layers cost, estimated or measured, and the plans made from that.

Device workers note times and bytes while they run (``notes``). The model's meter keeps smoothed
figures of them (``smoothing``, ``meter``), shown, saved and loaded as a table (``table``). Until
there are measurements, sizes decide (``estimates``). The plans of calls for which the user gave
none are kept, and renewed when that pays, by ``plan_book``.
"""

from .estimates import estimated_costs, layer_bytes, machine_of, multiplied_bytes
from .meter import CostMeter, RunRecord
from .notes import RunNotes, RunSamples
from .plan_book import PlanBook, plan_from_sizes
from .table import ModelCosts, read_document

__all__ = [
    "CostMeter",
    "ModelCosts",
    "PlanBook",
    "RunNotes",
    "RunRecord",
    "RunSamples",
    "estimated_costs",
    "layer_bytes",
    "machine_of",
    "multiplied_bytes",
    "plan_from_sizes",
    "read_document",
]
