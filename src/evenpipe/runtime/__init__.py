"""Executes a program on this device, with one small handler for each kind of pass and of transfer.

`Pipeline` is the class for users; the walker works behind it.
"""
