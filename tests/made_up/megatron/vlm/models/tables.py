"""The layers of an encoder of tables."""

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.media import Media
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.configs import outside_layers
from megatron.vlm.models.encoder_layers import EncoderLayers
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.vit.layers import join_rows, share_rows
from megatron.vlm.models.vit.native import RowViewer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.modality import TABLE
from omnibal_ext.modalities.table.architecture import TableArchitecture
from omnibal_ext.modalities.vision.architecture import VisionArchitecture


class TableEmbed(MegatronModule):
    """Rows of numbers -> this rank's share of the rows."""

    def __init__(self, config: TransformerConfig, table: TableArchitecture) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(table.numbers, table.hidden_size, dtype=config.params_dtype)
        config.init_method(self.linear.weight.data)

    def forward(self, hidden: None, batch: Microbatch) -> Tensor:
        """Values of the pack's tables -> rows."""
        values = batch.media_of(TABLE.size).values
        assert values is not None
        return share_rows(self.linear(values.to(self.config.params_dtype)).unsqueeze(1), self.config)


class TableProjector(MegatronModule):
    """This rank's rows -> tokens, on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig, language: TransformerConfig, table: TableArchitecture) -> None:
        super().__init__(outside_layers(config))
        self.shared, self.out = config, language.hidden_size
        self.norm = build_norm(self.config, table.hidden_size, config.layernorm_epsilon, "LayerNorm")
        self.linear = ColumnParallelLinear(
            table.hidden_size, table.tokens_a_row * self.out, gather_output=True, config=self.config,
            init_method=config.init_method, bias=True,
        )  # fmt: skip

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        """Rows -> tokens, table after table."""
        rows = join_rows(hidden, batch.media_of(TABLE.size).amount, self.shared)
        found, _ = self.linear(self.norm(rows))
        tokens: Tensor = found.view(-1, 1, self.out)
        return tokens


class TableLayers(EncoderLayers):
    """A linear layer, layers as a ViT's, and a projector."""

    viewed = TABLE.kinds[1:2]

    def layers(self, model: Architecture) -> VisionArchitecture:
        """The ViT whose layers are like the encoder's."""
        return TableArchitecture.among(model.further).as_vit

    def embed(self, config: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Numbers to rows."""
        return TableEmbed(config, TableArchitecture.among(model.further))

    def projector(self, config: TransformerConfig, language: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Rows to tokens."""
        return TableProjector(config, language, TableArchitecture.among(model.further))

    def made_up(self, model: Architecture, units: int, lengths: Sequence[int]) -> Media:
        """A table of so many rows, whose tokens are at the end."""
        table, tokens = TableArchitecture.among(model.further), sum(lengths)
        places = torch.arange(table.tokens(units), device=platform.device())
        values = torch.randn(units, table.numbers, device=places.device)
        return Media(((units,), *[()] * (len(lengths) - 1)), values=values, positions=tokens - 1 - places % tokens)

    def viewer(self, config: TransformerConfig, model: Architecture) -> RowViewer:
        """Rows of a table attend to each other."""
        return RowViewer(config, TABLE.size, lambda rows: [rows])
