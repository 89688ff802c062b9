"""Training data, from a dataset folder to the microbatches that a stage needs."""
