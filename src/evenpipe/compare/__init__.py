"""Simulate schedules that a user names, and compare them with each other and with measured steps."""

from __future__ import annotations

from .cases import Case, plan_cases

__all__ = ["Case", "plan_cases"]
