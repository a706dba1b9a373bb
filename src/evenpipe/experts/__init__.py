"""Experts of a layer on one or several processes: exchange of rows, products by expert, and their backward."""
