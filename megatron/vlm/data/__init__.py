"""From conversations and images to the microbatches that a stage needs."""
