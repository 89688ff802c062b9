"""One input of a sample, as datasets list it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from omnibal_ext.modalities.modality import Modality
from omnibal_ext.modalities.place import Mark, Place


class Item(Protocol):
    """One image, video or sound of a sample."""

    modality: ClassVar[Modality]

    @property
    def path(self) -> str:
        """Path of its file below the root of media, or name inside the input file if it lies there."""

    @property
    def place(self) -> Place:
        """Place inside the input file; () if it is a file of its own."""

    @property
    def crcs(self) -> tuple[Mark, ...]:
        """`Mark` of its file, or of each of its files; () if not recorded."""

    @property
    def files(self) -> tuple[str, ...]:
        """A file for each frame, below the root of media; (): it is one file, or a place in one."""

    @property
    def units(self) -> int:
        """How many units of its modality's size it is: tiles, mel frames."""

    @property
    def is_video_file(self) -> bool:
        """Whether it is a video file, of which frames are seen by their numbers."""


class FurtherItem(Item, Protocol):
    """Input of a modality beyond images."""

    @property
    def runs(self) -> tuple[int, ...]:
        """Lengths of the runs of its tokens in the text."""


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """How a model makes units and tokens of inputs of a modality beyond images; a dataset's manifest keeps it."""

    modality: ClassVar[Modality]

    @property
    @abstractmethod
    def decides(self) -> tuple[Any, ...]:
        """All values on which units and tokens depend: data made by one rule fits models whose rule has the same."""
