"""Opens and decodes untrusted or damaged files; no other package does.

Sizes, depths, types, ranges and lengths are checked before a value is used; a file that fails is a `UserError`.
"""
