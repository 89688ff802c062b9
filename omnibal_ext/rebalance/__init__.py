"""Batches balanced as they come: each phase of a step assigns the samples of all ranks anew."""
