"""What a model reads: words, and what an encoder makes words of. A folder each, registered in modality.py."""
