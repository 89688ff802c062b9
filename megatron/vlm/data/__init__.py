"""From a dataset folder to the microbatches that a stage needs."""
