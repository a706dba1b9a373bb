"""The configuration that tests of commands start from: nothing in it is wrong, and nothing takes long."""

TOML = """
[model]
architecture = "llama"
[model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 4
num_attention_heads = 2
max_position_embeddings = 64
[data]
files = "text.txt"
sequence_length = 16
[tokenizer]
vocabulary_size = 300
[pipeline]
processes = 2
microbatches = 2
[output]
folder = "run"
"""
