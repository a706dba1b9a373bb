"""Experts of a layer, on one process or over several: rows that travel, products by expert, and their backward."""
