"""Faults by plan: what happens to a job, to whom, and when. plan.py has the words, bringing.py does it."""

from farandole.testing.faults.parsing import parse
from farandole.testing.faults.plan import Fault, Plan

__all__ = ["Fault", "Plan", "parse"]
