"""Families of vision-language models, a folder each; `registry` finds them."""
