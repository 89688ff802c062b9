"""One input of a sample, as datasets list it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from omnibal_ext.modalities.modality import Modality
from omnibal_ext.modalities.place import Place


class Item(Protocol):
    """One image, video or sound of a sample."""

    modality: ClassVar[Modality]

    @property
    def path(self) -> str:
        """Path below the root of media; name inside the input file of one that lies there."""

    @property
    def place(self) -> Place:
        """Place inside the input file; () if it is a file."""

    @property
    def crcs(self) -> tuple[int, ...]:
        """CRC-32 of its file, or of each of its files; () if not recorded."""

    @property
    def units(self) -> int:
        """How much of its modality's size it is: tiles, mel frames."""

    @property
    def is_video_file(self) -> bool:
        """Whether frames of a video file are seen, whose numbers mean what they do by one way of counting."""


class FurtherItem(Item, Protocol):
    """Input of a modality beyond images."""

    @property
    def runs(self) -> tuple[int, ...]:
        """Lengths of the runs of its tokens in the text."""


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """How inputs of a modality beyond images become units and tokens; a dataset's manifest keeps it."""

    modality: ClassVar[Modality]

    @property
    @abstractmethod
    def decides(self) -> tuple[Any, ...]:
        """What decides units and tokens: data made by a rule fits a model whose rule has the same."""
