"""How a model is spread over devices, and the programs of a step: planned before anything runs."""
