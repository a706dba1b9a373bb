"""Search for the fastest configuration that fits a number of GPUs, and explain where time and memory go."""
