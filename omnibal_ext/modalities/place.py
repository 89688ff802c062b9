"""Place of something that is seen or heard, and the mark by which a change of it is found."""

Place = tuple[str | int, ...]
"""Inside an input file: ("bytes" or "base64", offset, size), ("cell", column, row, index in its list); (): a file."""
Mark = int | str
"""CRC-32 of the bytes, or "LENGTH-ETAG" of an object in a store: what changes with the content."""
