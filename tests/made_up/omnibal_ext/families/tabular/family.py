"""LLaVA with an encoder of tables, whose config.json has a `table_config`."""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.families.family import Family, Model
from omnibal_ext.families.fields import GENERAL
from omnibal_ext.families.llava.config import read_llava
from omnibal_ext.families.llava.family import FAMILY as LLAVA
from omnibal_ext.families.markup import IMAGE_MARK, FurtherMarkup, ImageMarkup
from omnibal_ext.families.section import ModelType, Section
from omnibal_ext.families.weights import Weight, linear, norm
from omnibal_ext.modalities.modality import TABLE
from omnibal_ext.modalities.table.architecture import TableArchitecture
from omnibal_ext.reading.checks import integer

LAYER = "table_tower.layers.{n}"
WEIGHTS = (
    *linear("table_embed", "linear", "table_tower.embed"),
    *norm("table", "input_layernorm", f"{LAYER}.norm1", "further"),
    *norm("table", "pre_mlp_layernorm", f"{LAYER}.norm2", "further"),
    *(
        Weight("table", f"self_attention.linear_qkv.{which}", (f"{LAYER}.qkv.{which}",), "table_packed_qkv")
        for which in ("weight", "bias")
    ),
    *linear("table", "self_attention.linear_proj", f"{LAYER}.proj"),
    *linear("table", "mlp.linear_fc1", f"{LAYER}.fc1"),
    *linear("table", "mlp.linear_fc2", f"{LAYER}.fc2"),
    *norm("table_projector", "norm", "table_tower.norm", "further"),
    *linear("table_projector", "linear", "table_tower.tokens"),
)
_LLAVA = LLAVA.models["llava"]
PART = replace(_LLAVA.model_type, weights=(*_LLAVA.model_type.weights, *WEIGHTS))
_SIZES = dict.fromkeys(("layers", "hidden_size", "heads", "ffn_hidden_size", "numbers", "tokens_a_row"), 1)


def read_tabular(name: str, config: Section) -> Architecture:
    """Read a config.json."""
    seen = read_llava(name, replace(config, values={**config.values, "model_type": "llava"}))
    token = config.take("table_token_id", integer())
    tower = config.inner("table_config", "tabular_encoder", always=True)
    table = TableArchitecture(**{field: tower.take(field, integer(1, 2**16)) for field in _SIZES})
    tower.refuse_unread()
    prompt = replace(seen.prompt, image_markup="tabular", further_token_ids={TABLE.size: token})
    return replace(seen, further=(table,), prompt=prompt, types=("tabular_llava", seen.types[1]))


FAMILY = Family(
    models={
        "tabular_llava": Model(
            replace(_LLAVA.model_type, weights=(*_LLAVA.model_type.weights, *WEIGHTS)), read_tabular, transformers=""
        )
    },
    model_types={"tabular_encoder": ModelType(_SIZES, GENERAL)},
    markups=(
        ImageMarkup(
            "tabular",
            IMAGE_MARK,
            (IMAGE_MARK, "<cell>"),
            first=True,
            further=(FurtherMarkup(TABLE, "<cell>", "[", "]"),),
        ),
    ),
)
