"""Record of the family of Idefics 3 and SmolVLM."""

from typing import Any

from omnibal_ext.families.family import Family, Model, Packs
from omnibal_ext.families.fields import GENERAL, names, tower
from omnibal_ext.families.idefics3.config import read_idefics3
from omnibal_ext.families.idefics3.presets import PRESETS
from omnibal_ext.families.markup import IMAGE_MARK, ImageMarkup
from omnibal_ext.families.section import ModelType
from omnibal_ext.families.towers.tiles import clip_weights
from omnibal_ext.families.weights import Weight
from omnibal_ext.modalities.vision.runs import TokenRuns

_FIELDS: dict[str, Any] = {"image_token_id": 128257, "scale_factor": 2, "tie_word_embeddings": False}


class Markup(ImageMarkup):
    """Text of an image: a line of tiles for each row, an empty line, the entire image; of one tile this alone."""

    def image_text(self, runs: TokenRuns) -> str:
        """Return the text of an image: each tile's token behind its row and column, then the thumbnail's."""
        around = "<fake_token_around_image>"
        lines = (
            [f"{around}<row_{row + 1}_col_{column + 1}>{self.context}" for column in range(runs.columns)]
            for row in range(runs.rows * runs.whole)
        )
        return "".join("".join((*line, "\n")) for line in lines) + "\n" * runs.whole + super().image_text(TokenRuns())


WEIGHTS = (
    *clip_weights(last_norm=True),
    Weight("projector", "linear.weight", ("connector.modality_projection.proj.weight",)),
)
VISION = ModelType(
    tower(12, 1152, 16, 3072, image_size=224, patch_size=32, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
    GENERAL | names("max_image_size size use_base_siglip"),  # the processor's
)
MODEL = Model(
    ModelType(_FIELDS, GENERAL | names("_pad_token_id image_seq_len vocab_size"), WEIGHTS),
    read_idefics3,
    takes=("pixel_attention_mask",),
    packs=Packs("split"),
)
FAMILY = Family(
    models={"idefics3": MODEL, "smolvlm": MODEL},
    model_types={"idefics3_vision": VISION, "smolvlm_vision": VISION},
    presets=PRESETS,
    markups=(
        Markup(
            "idefics3",
            IMAGE_MARK,
            ("<fake_token_around_image>", IMAGE_MARK),
            before="<fake_token_around_image><global-img>",
            after="<fake_token_around_image>",
            gap="",
        ),
    ),
    folder_says_template=True,
    spellings=(
        (r"^model\.vision_model\.", "vision_tower."),
        (r"^model\.text_model\.", "language_model.model."),
        (r"^model\.connector\.", "connector."),
    ),
    modules=((r"^vision_tower\.", "vision_model."), (r"^language_model\.model\.", "text_model.")),
)
