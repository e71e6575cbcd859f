"""Planned faults: the action on a job, its victims, and its time. fault_plan.py has the grammar, bringing.py executes
it."""

from farandole.testing.faults.fault_plan import Fault, Plan, parse

__all__ = ["Fault", "Plan", "parse"]
