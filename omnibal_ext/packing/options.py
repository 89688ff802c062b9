"""How to pack: the options of `omnibal pack`, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import FURTHER, LANGUAGE, VISION, Budgets
from omnibal_ext.packing.widths import check_widths

PADDED_METHODS = ("random", "length_group", "device_group")
METHODS = ("balanced", "isf", *PADDED_METHODS)
LAST_ITERATION = ("next_epoch", "empty")
OVERSIZE = ("reject", "alone")
WAIT = 0.003


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How a corpus is packed: method, budgets, ranks, epochs and effort, as the flags of `omnibal pack` say."""

    method: str = "balanced"
    vit_budget: int = 0
    """Most tiles of a pack, and of a sample."""
    llm_budget: int = 0
    """Most tokens of a pack, and of a sample. Padded methods hold all budgets for samples, not for packs."""
    budgets: Mapping[str, int] = field(default_factory=dict)
    """Most of each further size of a pack, and of a sample; 0: counted and spread over iterations, but not limited."""
    micro_batches: int = 1
    data_parallel_size: int = 1
    samples_per_pack: int = 4
    """Samples of a pack of the padded methods."""
    last_iteration: str = "next_epoch"
    """What completes the last iteration of an epoch: packs of the "next_epoch", or "empty" packs of weight 0."""
    oversize: str = "reject"
    """A sample over budget: "reject" leaves it out and lists it, "alone" gives it a pack of its own."""
    epochs: int | None = None
    """Epochs packed separately; training cycles through them. None: as many as fractional weights need to see all
    samples, 1 without such weights."""
    seed: int = 0
    pipeline_model_parallel_size: int | None = None
    """1: a rank's seconds of all parts of the model add up; more: ranks wait for each part separately. None: as with
    more, unless there is one microbatch, with which a pipeline would idle."""
    wait: float = WAIT
    """Fraction of device time that ranks may wait for the slowest; more lets iterations look more like the corpus."""
    seconds: float = 1.0
    """Effort for equalizing packs and for mixing iterations: a number of steps, given in nominal seconds. More than
    65,536 packs have as much each, and more for exchanges where they stay unequal."""
    widths: tuple[int, ...] = (1,)
    """Numbers of ranks that may run a pack together, ascending; its budgets are multiplied by that number."""
    narrow_first: int = 0
    """Number of first iterations, in the first epoch, with packs of width 1 only; no effect without wide packs."""

    def __post_init__(self) -> None:
        """Raise UserError for a value out of range."""
        for name, choices in (("method", METHODS), ("last_iteration", LAST_ITERATION), ("oversize", OVERSIZE)):
            if getattr(self, name) not in choices:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} {getattr(self, name)}: must be one of {', '.join(choices)}")
        least_one = ("llm_budget", "micro_batches", "data_parallel_size", "samples_per_pack", "epochs")
        for name in (*least_one, "pipeline_model_parallel_size"):
            if (getattr(self, name) or 1) < 1 or getattr(self, name) == 0:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be 1 or more")
        if self.vit_budget < 0 or self.seed < 0 or not 0 <= self.seconds < float("inf"):
            raise UserError("--vit-budget, --seed and --seconds must be 0 or more")
        if self.narrow_first < 0:
            raise UserError(f"--narrow-first {self.narrow_first}: must be 0 iterations or more")
        if not 0 < self.wait < 1:
            raise UserError(f"--wait {self.wait}: must be a share of device time, above 0 and below 1")
        check_widths(self.widths, self.data_parallel_size)
        self._check_method_of_widths()

    def _check_method_of_widths(self) -> None:
        """Raise UserError for options that cannot be together with packs wider than a rank."""
        if not self.wide:
            return
        shown = f"--widths {','.join(map(str, self.widths))}"
        for one in FURTHER:
            if one.size in self.budgets:
                raise UserError(f"{shown}: packs of several ranks cannot have {one.inputs} yet; leave it out")
        if self.method != "balanced":
            raise UserError(f"{shown}: --method {self.method} makes packs of one rank; use balanced")
        if self.narrow_first and self.widths[0] != 1:
            raise UserError(f"{shown}: --narrow-first {self.narrow_first} needs width 1 among them")
        if self.oversize == "alone":
            raise UserError(
                f"{shown}: --oversize alone keeps samples of any size, beyond what ranks hold; leave it out"
            )

    @property
    def held(self) -> str:
        """Budgets of the widest pack, in words for messages."""
        ranks = self.widths[-1]
        together = f" on {ranks} ranks" if ranks > 1 else ""
        further = "".join(f", {self.budgets[one.size]} {one.units}" for one in FURTHER if one.size in self.budgets)
        return f"{ranks * self.vit_budget} tiles and {ranks * self.llm_budget} tokens{further}{together}"

    @property
    def all_budgets(self) -> Budgets:
        """Budgets of one rank by name of size: tiles, tokens and further ones."""
        return {VISION.size: self.vit_budget, LANGUAGE.size: self.llm_budget, **self.budgets}

    @property
    def wide(self) -> bool:
        """Whether several ranks may run a pack together."""
        return self.widths != (1,)

    @property
    def pad(self) -> bool:
        """Whether samples are padded to the longest of their pack."""
        return self.method in PADDED_METHODS

    @property
    def one_sum(self) -> bool:
        """Whether a rank runs all parts of the model, so that their seconds add up: without a pipeline."""
        pipeline = self.pipeline_model_parallel_size
        return self.micro_batches == 1 if pipeline is None else pipeline == 1

    @property
    def global_batch(self) -> int:
        """Packs of one iteration: data-parallel ranks x microbatches."""
        return self.data_parallel_size * self.micro_batches
