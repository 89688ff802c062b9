"""What is watched while a run trains: its figures, how far it is from the plan, what goes wrong."""
