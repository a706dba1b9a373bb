"""Search for the shortest order of a small case: named schedules, a solver, and the proof that nothing is shorter."""

from __future__ import annotations

from .search import SearchResult, order_problem_of, search

__all__ = ["SearchResult", "order_problem_of", "search"]
