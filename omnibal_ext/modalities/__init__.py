"""What a model reads, a folder for each modality: named in modality.py, counted by the functions in registry.py."""
