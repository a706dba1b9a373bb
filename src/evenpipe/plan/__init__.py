"""Search: the best order for given costs and memory, and what no order can beat."""
