"""Read the config.json of Qwen2.5-Omni and Qwen3-Omni: of the thinker, alone or in a whole model.

Its ViT is Qwen2.5-VL's, or Qwen3-VL's.
"""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.families.qwen_omni.audio import read_audio
from omnibal_ext.families.qwen_vl.config import Generation, with_tower
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import tied
from omnibal_ext.modalities.modality import AUDIO
from omnibal_ext.modalities.vision.architecture import VideoClock
from omnibal_ext.reading.checks import anything, finite, integer, mapping

PACE = finite(1e-3, 1e4)


def read_thinker(name: str, config: Section, code: Generation) -> Architecture:
    """Read a thinker's config.json. Raises UserError naming an unsupported field."""
    stem = config["model_type"].removesuffix("_thinker")
    words, tower, hearing = (
        config.section_of(field, f"{stem}_{kind}", config.take(field, mapping(anything)))
        for field, kind in (
            ("text_config", "text"), ("vision_config", "vision_encoder"), ("audio_config", "audio_encoder")
        )
    )  # fmt: skip
    language = code.read_language(words)
    image = config.take("image_token_index" if code.windows else "image_token_id")
    sound = config.take("audio_token_index" if code.windows else "audio_token_id", integer(0, 2**24))
    prompt = PromptFormat(code.markup, image, code.template, "native", further_token_ids={AUDIO.size: sound})
    further = (read_audio(hearing, language.hidden_size),)
    types, tied_words = (config["model_type"], f"{stem}_text"), tied(config)
    model = with_tower(name, tower, language, code, prompt=prompt, types=types, tied=tied_words, further=further)
    chunk = config.take("seconds_per_chunk", PACE) if code.windows else None
    assert model.vision.native is not None
    native = replace(model.vision.native, clock=VideoClock(config.take("position_id_per_seconds", PACE), chunk))
    return replace(model, vision=replace(model.vision, native=native))


def read_whole(name: str, config: Section, code: Generation) -> Architecture:
    """Read the thinker out of a whole model's config.json, which has talker and vocoder too."""
    inner = config.inner("thinker_config", f"{config['model_type']}_thinker", always=True)
    model = read_thinker(name, replace(inner, folder=config.folder), code)
    inner.refuse_unread()
    return model
