"""The 6B + 20B model builds from real core layers, without memory, and has the size it is published with."""

import os

import pytest
import torch

from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.single import single_process


def test_internvl_chat_1_5_builds_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with single_process("internvl-chat-1.5", []) as inputs:
        chain = Chain.of(inputs.args, inputs.architecture)
        with torch.device("meta"):
            stage = Stage(chain, 0, len(chain.kinds))
    counts = dict.fromkeys(chain.kinds, 0)
    for kind, link in zip(chain.kinds, stage.links.values(), strict=True):
        counts[kind] += sum(weight.numel() for weight in link.parameters())
    assert all(weight.is_meta for weight in stage.parameters())
    assert 5.4e9 < counts["patch_embed"] + counts["vit"] < 5.6e9  # published: 5.5B
    assert 19.7e9 < counts["word_embed"] + counts["llm"] + counts["head"] < 20e9  # published: 19.9B
    assert 0.10e9 < counts["projector"] < 0.13e9
