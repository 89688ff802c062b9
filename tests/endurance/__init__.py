"""Long runs of tests, as programs: each has a short form in the suite."""
