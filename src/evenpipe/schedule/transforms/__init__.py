"""Transforms of orders, in the order of use: slices, vocabulary or interlaced, recompute, offload, forward_only for
evaluation, communication, sharding.

All are pure functions from an order to another order, except that communication returns a program, and sharding accepts
and returns either.
"""
