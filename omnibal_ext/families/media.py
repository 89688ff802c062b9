"""Tiling rules by their name in datasets, video and sound rules by image markup."""

from collections.abc import Callable, Mapping

from omnibal_ext.families.deepseek_vl.tiling import Letterbox
from omnibal_ext.families.gemma3.tiling import Gemma
from omnibal_ext.families.gemma4.tiling import Gemma4
from omnibal_ext.families.gemma4_unified.tiling import Gemma4Unified
from omnibal_ext.families.glm_v.tiling import NativeGrown
from omnibal_ext.families.glm_v.videos import VIDEO_RULES as GLM_V
from omnibal_ext.families.idefics3.tiling import Split
from omnibal_ext.families.internvl.tiling import Internvl, InternvlEach
from omnibal_ext.families.llava.tiling import AnyRes, AnyResMax9, Crop, Fixed, Pad
from omnibal_ext.families.mistral3.tiling import NativeEdge
from omnibal_ext.families.paddleocr_vl.tiling import NativeWidened
from omnibal_ext.families.paligemma.tiling import Paligemma
from omnibal_ext.families.qwen_omni.sounds import SOUND_RULES as QWEN_OMNI
from omnibal_ext.families.qwen_omni.videos import VIDEO_RULES as QWEN_OMNI_VIDEOS
from omnibal_ext.families.qwen_vl.videos import VIDEO_RULES as QWEN_VL
from omnibal_ext.families.towers.tiling import Native
from omnibal_ext.families.towers.video_rules import VideoRule
from omnibal_ext.modalities.audio.sounds import SoundRule
from omnibal_ext.modalities.vision.tiling import TilingRule

_RULES: tuple[TilingRule, ...] = (
    Internvl(), InternvlEach(), AnyRes(), AnyResMax9(), Pad(), Crop(), Fixed(), Gemma(), Paligemma(),
    Native(), Gemma4(), Gemma4Unified(), NativeGrown(), NativeEdge(), Split(), Letterbox(), NativeWidened(),
)  # fmt: skip
TILINGS: Mapping[str, TilingRule] = {rule.name: rule for rule in _RULES}
VIDEO_RULES: Mapping[str, VideoRule] = {**QWEN_VL, **QWEN_OMNI_VIDEOS, **GLM_V}
SOUND_RULES: Mapping[str, Callable[..., SoundRule]] = QWEN_OMNI
"""Markup -> maker of the rule by which a model hears with a given encoder."""
