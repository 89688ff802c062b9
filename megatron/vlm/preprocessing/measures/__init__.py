"""How what records name is measured: how much of each size it is, how many tokens; found in `registry`."""
