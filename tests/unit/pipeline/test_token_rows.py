"""Rows of image and audio tokens from those who encoded them: features behind the images, sounds behind both."""

from typing import Any

import torch

from megatron.vlm.pipeline.token_rows import EncoderRows, TokenRows

ENCODERS = EncoderRows((2, 3), copies=2), EncoderRows((2, 0, 1))
ROWS = TokenRows(ENCODERS, workers=(1, 0, 0, 1, 1), shares=2, tensor_ranks=1)
"""Two images of two and three tokens with a feature each, sounds of two tokens and one."""


def test_rows_of_two_parts_by_hand() -> None:
    """Images 0..4, their features 5..9, sounds 10..12."""
    whole = torch.arange(13)[:, None]
    pieces = [ROWS.piece(whole, part, 0) for part in (0, 1)]
    assert [piece.flatten().tolist() for piece in pieces] == [[2, 3, 4, 7, 8, 9, 10, 11], [0, 1, 5, 6, 12]]
    assert [ROWS.count(part, 0) for part in (0, 1)] == [8, 5]
    nobody: Any = None
    assert torch.equal(ROWS.assemble(pieces, nobody), whole)
