"""From one command to a running job: checks, profile and plan where they are stale, ranks that end with us."""
