"""Tensor parallelism: which blocks of a layer can be cut over several processes, and how these exchange rows."""
