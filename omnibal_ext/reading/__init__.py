"""Files that anyone may have written, or that a disk may have damaged: the one place that opens and decodes them.

Sizes, depths, types, ranges and lengths are bounded before anything is believed; all else is a `UserError` of one line.
"""
