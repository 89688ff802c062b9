"""Shows a plan or a run: one HTML page, a trace."""
