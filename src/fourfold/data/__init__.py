"""Training data: token files, tokenizers, the order of samples, and the rows that each rank reads."""
