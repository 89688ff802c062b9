"""An encoder of tables as plain data, and how tables are read."""

from dataclasses import dataclass
from typing import Any, ClassVar

from omnibal_ext.modalities.encoder import Encoder, EncoderArchitecture
from omnibal_ext.modalities.item import Rule
from omnibal_ext.modalities.modality import TABLE, Modality
from omnibal_ext.modalities.place import Place
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture


@dataclass(frozen=True)
class TableArchitecture(EncoderArchitecture):
    """Rows of a table attend to each other; each becomes `tokens_a_row` tokens."""

    numbers: int = 6
    tokens_a_row: int = 2

    @property
    def encoder(self) -> Encoder:
        """What chain, flow and sizes of packs follow from."""
        return Encoder(TABLE, (None,) * self.layers, self.rows, self.tokens)

    @property
    def as_vit(self) -> VisionArchitecture:
        """The ViT at native resolution whose layers are like this encoder's."""
        return VisionArchitecture(
            self.layers, self.hidden_size, self.heads, self.ffn_hidden_size, norm_epsilon=1e-5, class_token=False,
            activation="gelu", layer_scale=False, native=NativeResolution(),
        )  # fmt: skip

    def rows(self, rows: int) -> int:
        """Rows that the layers see."""
        return rows

    def tokens(self, rows: int) -> int:
        """LLM tokens of a table."""
        return rows * self.tokens_a_row


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a sample."""

    modality: ClassVar[Modality] = TABLE
    is_video_file: ClassVar[bool] = False
    path: str
    rows: int
    tokens: int
    place: Place = ()
    crcs: tuple[int, ...] = ()

    @property
    def units(self) -> int:
        """Rows."""
        return self.rows

    @property
    def runs(self) -> tuple[int, ...]:
        """One run of tokens."""
        return (self.tokens,)


@dataclass(frozen=True, slots=True)
class TableRule(Rule):
    """Tables of so many numbers a row."""

    modality: ClassVar[Modality] = TABLE
    numbers: int
    tokens_a_row: int

    @property
    def decides(self) -> tuple[Any, ...]:
        """All of it."""
        return self.numbers, self.tokens_a_row
