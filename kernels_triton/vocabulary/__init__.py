"""The two ends of a model: embeddings, logits of the rows that sample, and the draw."""
