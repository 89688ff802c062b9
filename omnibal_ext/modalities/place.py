"""Place of something that is seen or heard."""

Place = tuple[str | int, ...]
"""Inside an input file: ("bytes" or "base64", offset, size), ("cell", column, row, index in its list); (): a file."""
