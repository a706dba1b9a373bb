"""Figures of the paper on vocabulary parallelism, to stand beside ours: arXiv 2411.05288, tables 3, 5 and 6.

They were measured on up to 32 A100-80G (fp16, microbatches of one sequence, 128 of them). The paper counts attention
without its mask; its figures for 8 GPUs at 2k tokens follow from its published iteration times with a peak of
320 TFLOP/s (github.com/sail-sg/VocabularyParallelism, artifact), where the data sheet has 312.
"""

from __future__ import annotations

VOCABULARIES = (32_000, 64_000, 128_000, 256_000)
MICROBATCHES = 128
PEAK_FLOPS = 320e12
"""That the paper's MFU is a share of."""

Row = tuple[float | None, ...]

MFU: dict[tuple[str, int, int, str], Row] = {
    ("1f1b", 8, 2048, "first-last"): (46.16, 40.48, 33.11, 25.23),
    ("1f1b", 8, 2048, "redistribute"): (46.01, 46.37, 44.22, 38.91),
    ("1f1b", 8, 2048, "vocab-1"): (50.42, 50.28, 49.93, 50.12),
    ("1f1b", 8, 2048, "vocab-2"): (50.23, 50.18, 49.82, 49.69),
    ("1f1b", 8, 2048, "interlaced"): (51.18, 50.94, 50.97, 50.92),
    ("1f1b", 8, 4096, "first-last"): (47.05, 41.87, 35.00, 26.75),
    ("1f1b", 8, 4096, "redistribute"): (46.93, 46.78, 47.44, 43.01),
    ("1f1b", 8, 4096, "vocab-1"): (50.98, 50.98, 50.83, 50.66),
    ("1f1b", 8, 4096, "vocab-2"): (50.93, 50.75, 50.56, 50.40),
    ("1f1b", 8, 4096, "interlaced"): (51.41, 51.82, 51.32, 51.38),
    ("1f1b", 16, 2048, "first-last"): (45.66, 40.09, 32.44, 24.21),
    ("1f1b", 16, 2048, "redistribute"): (45.56, 42.82, 38.65, 36.98),
    ("1f1b", 16, 2048, "vocab-1"): (49.02, 50.62, 50.54, 50.66),
    ("1f1b", 16, 2048, "vocab-2"): (48.90, 50.49, 50.46, 50.46),
    ("1f1b", 16, 2048, "interlaced"): (48.94, 48.97, 49.19, 49.52),
    ("1f1b", 16, 4096, "first-last"): (47.56, 41.21, 33.88, 25.33),
    ("1f1b", 16, 4096, "redistribute"): (47.41, 43.07, 43.15, 40.15),
    ("1f1b", 16, 4096, "vocab-1"): (50.93, 50.97, 50.71, 51.22),
    ("1f1b", 16, 4096, "vocab-2"): (50.97, 50.80, 50.68, 50.90),
    ("1f1b", 16, 4096, "interlaced"): (49.52, 49.53, 49.77, 49.84),
    ("v-half", 16, 2048, "first-last"): (46.41, 38.52, 28.75, 19.99),
    ("v-half", 16, 2048, "vocab-1"): (52.82, 53.11, 53.41, 52.89),
    ("v-half", 16, 4096, "first-last"): (50.01, 41.17, 31.36, 21.90),
    ("v-half", 16, 4096, "vocab-1"): (58.69, 58.56, 58.44, 57.59),
    ("v-half", 32, 2048, "first-last"): (52.80, 45.56, 35.69, None),
    ("v-half", 32, 2048, "vocab-1"): (57.70, 57.62, 57.69, 57.80),
    ("v-half", 32, 4096, "first-last"): (56.06, 48.17, 37.85, None),
    ("v-half", 32, 4096, "vocab-1"): (60.10, 60.14, 60.72, 59.82),
}
"""Percent, by schedule, devices, tokens and vocabulary mode (our names), one per vocabulary; None: out of memory."""

OUTPUT_EFFICIENCY: dict[tuple[int, int, str], float] = {
    (8, 2048, "vocab-1"): 0.9129,
    (8, 2048, "vocab-2"): 0.8672,
    (16, 2048, "vocab-1"): 0.8422,
    (16, 2048, "vocab-2"): 0.7984,
    (32, 2048, "vocab-1"): 0.8059,
    (32, 2048, "vocab-2"): 0.7593,
    (8, 4096, "vocab-1"): 0.9321,
    (8, 4096, "vocab-2"): 0.8836,
    (16, 4096, "vocab-1"): 0.8802,
    (16, 4096, "vocab-2"): 0.8342,
    (32, 4096, "vocab-1"): 0.8524,
    (32, 4096, "vocab-2"): 0.7966,
}
"""Throughput of S and T relative to linear scaling, by devices, tokens and mode, at 256k and without communication."""

INPUT_EFFICIENCY: dict[tuple[int, int], float] = {
    (8, 2048): 0.3999,
    (16, 2048): 0.2885,
    (32, 2048): 0.1518,
    (8, 4096): 0.2769,
    (16, 4096): 0.1552,
    (32, 4096): 0.0835,
}
"""The same of the input embedding, by devices and tokens."""
