"""ms-swift with packs of two budgets: give this file to `--external_plugins`, with `--packing true`.

The budget is for Qwen-VL, whose `pixel_values` are patches: 4 to a visual token.
"""

from omnibal_ext.integrations.ms_swift import install

install(vit_budget=16_384)  # where attention counts, costs=PackCosts.of_model("MODEL_FOLDER")
