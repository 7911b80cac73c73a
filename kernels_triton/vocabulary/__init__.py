"""Operations over the vocabulary: embeddings, logits of the rows that sample, penalties, sampling, logprobs."""
