"""Communicators between processes: each carries its transfers in one order, watched while it waits."""
