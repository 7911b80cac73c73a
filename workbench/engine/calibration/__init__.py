"""Times of a model's operations on this computer, that `simulate` predicts `run` from; no throughput (law 10)."""
