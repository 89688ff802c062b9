"""Batches balanced as they come: before each phase of a step the samples of all ranks are dealt anew."""
