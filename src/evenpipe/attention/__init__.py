"""Attention for models whose sequences are split into pieces, across processes or one after the other."""
