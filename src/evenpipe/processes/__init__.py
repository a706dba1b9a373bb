"""Starts processes, watches them, and ends them: one of them fails, and all others say which one and why."""
