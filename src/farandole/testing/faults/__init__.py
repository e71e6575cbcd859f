"""Faults by plan: what happens to a job, to whom, and when. fault_plan.py has the grammar, bringing.py does it."""

from farandole.testing.faults.fault_plan import Fault, Plan
from farandole.testing.faults.parsing import parse

__all__ = ["Fault", "Plan", "parse"]
