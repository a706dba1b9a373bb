"""Compare named schedules in one case, search for the best order, and search for the best configuration.

`plan_cases` simulates schedules side by side; `search` finds the shortest order of a small `order_problem_of`.
"""

from __future__ import annotations

from .cases import Case, plan_cases
from .search import SearchResult, order_problem_of, search

__all__ = ["Case", "SearchResult", "order_problem_of", "plan_cases", "search"]
