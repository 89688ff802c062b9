"""A machine with GPUs whose memory is the host's: programs run on it from their first line to their last, in numbers.

The device of shapes (`tests/shapes`) says what a GPU is asked; here it is a start, an iteration, a save and a resume
that must work where `torch.cuda.is_available()` says yes.
"""
