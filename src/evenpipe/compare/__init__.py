"""Simulate schedules that a user names, beside each other and beside measured steps."""

from __future__ import annotations

from .cases import Case, plan_cases

__all__ = ["Case", "plan_cases"]
