"""Linear attention: layers with a recurrent state, which starts anew in each sample of a pack."""
