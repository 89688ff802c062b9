"""Video-LLaVA (arXiv 2311.10122): LLaVA, and another CLIP that sees frames of videos, before the same projector."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.errors import UserError
from omnibal_ext.families.family import Family, Model, Packs, Preset
from omnibal_ext.families.fields import DATA, GENERAL
from omnibal_ext.families.llava.config import read_llava
from omnibal_ext.families.llava.family import FAMILY as LLAVA
from omnibal_ext.families.markup import IMAGE_MARK, FurtherMarkup, ImageMarkup
from omnibal_ext.families.section import ModelType, Section
from omnibal_ext.families.towers.sizes import LANGUAGE_MODELS, VISION_TOWERS
from omnibal_ext.families.towers.tiles import clip_weights
from omnibal_ext.families.weights import Weight
from omnibal_ext.modalities.film.architecture import FilmArchitecture
from omnibal_ext.modalities.modality import FILM, VISION
from omnibal_ext.reading.checks import integer

_LLAVA = LLAVA.models["llava"].model_type
FIELDS = {**_LLAVA.defaults, "video_token_index": 32001}


def _of_frames(weights: Iterable[Weight]) -> Iterator[Weight]:
    """Yield the ViT's names of weights as those of the encoder of videos."""
    kinds = dict(zip(VISION.kinds, FILM.kinds, strict=True))
    for one in weights:
        theirs = tuple(name.replace("vision_tower.", "video_tower.") for name in one.theirs)
        form = one.form.replace("vision_", f"{FILM.name}_")
        yield replace(one, kind=kinds[one.kind], theirs=theirs, form=form)


def read_video_llava(name: str, config: Section) -> Architecture:
    """Read a Video-LLaVA's config.json. Raises UserError naming an unsupported field."""
    seen = read_llava(name, replace(config, values={**config.values, "model_type": "llava"}))
    if not seen.vision.class_token or seen.vision.side_by_side:
        raise UserError(f"{config.where}: features of one layer of CLIP are supported, not of several, nor SigLIP's")
    token = config.take("video_token_index", integer(0, 2**24))
    prompt = replace(
        seen.prompt, image_markup="video-llava", tiling="crop", further_token_ids={FILM.size: token}
    )  # fmt: skip
    further = (FilmArchitecture.like(seen.vision),)
    return replace(seen, further=further, prompt=prompt, types=("video_llava", seen.types[1]))


FAMILY = Family(
    models={
        "video_llava": Model(
            ModelType(
                FIELDS,
                GENERAL | DATA | {"vocab_size", "video_seq_length"},
                (*_LLAVA.weights, *_of_frames(clip_weights())),
            ),
            read_video_llava,
            takes=("pixel_values_videos",),
            packs=Packs("crop"),
        )
    },
    presets={
        "video-llava-7b": Preset(
            {
                "model_type": "video_llava",
                "vision_config": {**VISION_TOWERS["clip-l-336"], "image_size": 224},
                "text_config": LANGUAGE_MODELS["vicuna-7b"],
            }
        )
    },
    markups=(
        ImageMarkup(
            "video-llava", IMAGE_MARK, (IMAGE_MARK, FILM.mark), first=True, further=(FurtherMarkup(FILM, FILM.mark),)
        ),
    ),
    spellings=(
        (r"^(model\.)?image_tower\.(vision_model\.)?", "vision_tower."),
        (r"^(model\.)?video_tower\.(vision_model\.)?", "video_tower."),
    ),
    modules=((r"^vision_tower\.", "image_tower."),),
    idle=(r"video_tower\.(post_layernorm|embeddings\.position_ids$)",),
)
