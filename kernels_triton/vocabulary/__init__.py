"""Operations over the vocabulary: embeddings, logits of the rows that sample, and sampling."""
