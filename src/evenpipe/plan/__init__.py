"""Which schedule: named ones compared in one case, and a search for the best order, with what no order can beat.

`plan_cases` simulates schedules side by side; `search` looks for the shortest order of a small `problem_of` any kind.
"""

from __future__ import annotations

from .cases import Case, plan_cases
from .search import SearchResult, problem_of, search

__all__ = ["Case", "SearchResult", "plan_cases", "problem_of", "search"]
