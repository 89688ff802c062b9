"""InternVL 1.5 to 3.5, as transformers has it and in its own repository's form."""
