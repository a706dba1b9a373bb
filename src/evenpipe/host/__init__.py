"""What is kept in the memory of the host: activations, their pools and copies, and states of the optimizer."""
