"""What is done to the layers of a stage: split backwards, checkpointing, compilation, experts one by one."""
