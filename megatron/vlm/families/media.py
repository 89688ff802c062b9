"""Tiling rules by their name in datasets, video and sound rules by image markup."""

from collections.abc import Callable, Mapping

from megatron.vlm.data.media.mel import SoundRule
from megatron.vlm.data.media.tiling import TilingRule
from megatron.vlm.data.media.video_rules import VideoRule
from megatron.vlm.families.deepseek_vl.tiling import Letterbox
from megatron.vlm.families.gemma3.tiling import Gemma
from megatron.vlm.families.gemma4.tiling import Gemma4
from megatron.vlm.families.gemma4_unified.tiling import Gemma4Unified
from megatron.vlm.families.glm_v.tiling import NativeGrown
from megatron.vlm.families.glm_v.videos import VIDEO_RULES as GLM_V
from megatron.vlm.families.idefics3.tiling import Split
from megatron.vlm.families.internvl.tiling import Internvl, InternvlEach
from megatron.vlm.families.llava.tiling import AnyRes, AnyResMax9, Crop, Fixed, Pad
from megatron.vlm.families.mistral3.tiling import NativeEdge
from megatron.vlm.families.paddleocr_vl.tiling import NativeWidened
from megatron.vlm.families.paligemma.tiling import Paligemma
from megatron.vlm.families.qwen_omni.sounds import SOUND_RULES as QWEN_OMNI
from megatron.vlm.families.qwen_omni.videos import VIDEO_RULES as QWEN_OMNI_VIDEOS
from megatron.vlm.families.qwen_vl.videos import VIDEO_RULES as QWEN_VL
from megatron.vlm.families.towers.tiling import Native

_RULES: tuple[TilingRule, ...] = (
    Internvl(), InternvlEach(), AnyRes(), AnyResMax9(), Pad(), Crop(), Fixed(), Gemma(), Paligemma(),
    Native(), Gemma4(), Gemma4Unified(), NativeGrown(), NativeEdge(), Split(), Letterbox(), NativeWidened(),
)  # fmt: skip
TILINGS: Mapping[str, TilingRule] = {rule.name: rule for rule in _RULES}
VIDEO_RULES: Mapping[str, VideoRule] = {**QWEN_VL, **QWEN_OMNI_VIDEOS, **GLM_V}
SOUND_RULES: Mapping[str, Callable[..., SoundRule]] = QWEN_OMNI
"""Of an encoder: each makes the rule by which a model hears with it."""
