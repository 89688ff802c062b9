"""A preprocessing run as a value: inputs, recipe, output folder, and which of its parts are ready.

Parts are kept in `OUTPUT.work/HASH/`. The hash covers everything that decides their bytes, so that runs with other
inputs or flags do not use them.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.vlm.data.formats.rows import ROWS_PER_PART, InputFile, PartSource
from megatron.vlm.data.manifest import SCHEMA_VERSION, is_read_alike
from megatron.vlm.data.media.videos import READING
from megatron.vlm.preprocessing.inputs import read_inputs
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import open_recipe
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import TEMPLATES
from omnibal_ext.files.folders import TAKE_ANOTHER
from omnibal_ext.files.records import sha256_of
from omnibal_ext.identity import content_of, differences
from omnibal_ext.modalities.modality import FURTHER_SIZES
from omnibal_ext.reading.checks import anything, mapping
from omnibal_ext.reading.document import read_json, sealed_by

PARTS = 5
"""Version of the files of parts: those of another one, or of other sizes, are not used."""
CHECK_FIELDS = ("decode_images", "image_checksums")
"""Fields of a recipe that only decide how closely images are checked."""
OF_HEARING = ("clock", "use_audio_in_video")
"""Fields of a recipe for models that hear."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th part from `index` on, the work of one task of a Slurm array."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read `i/n`, i from 0 to n-1. Raises `UserError` otherwise."""
        numbers = text.split("/")
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):
            index, count = map(int, numbers)
            if index < count:
                return cls(index, count)
        raise UserError(f"--shard {text}: must be i/n with i from 0 to n-1, such as 0/16")


@dataclass(frozen=True, slots=True)
class PreprocessJob:
    """A preprocessing run. `identity`: what decides its result's bytes, as JSON; `work`: the folder of its parts."""

    inputs: tuple[InputFile, ...]
    recipe: Recipe
    output: Path
    identity: dict[str, Any]
    work: Path

    @property
    def sources(self) -> tuple[PartSource, ...]:
        """All parts, in the order of the inputs."""
        return tuple(part for file in self.inputs for part in file.parts)

    @property
    def lines(self) -> int:
        """Lines of all inputs, blank ones included."""
        return sum(file.lines for file in self.inputs)

    def part_path(self, number: int) -> Path:
        """Return the file of a part."""
        return self.work / f"{number:07d}.npz"

    def missing(self, shard: Shard | None = None) -> list[int]:
        """List the numbers of the parts (of one shard) that are not ready."""
        shard = shard or Shard()
        numbers = range(shard.index, len(self.sources), shard.count)
        return [number for number in numbers if not self.part_path(number).exists()]

    def tidy(self) -> None:
        """Remove the parts of all jobs for this output. The caller must hold the exclusive lock on the output."""
        shutil.rmtree(self.work.parent, ignore_errors=True)

    def finished(self) -> dict[str, Any] | None:
        """Return the manifest of the output folder if this job made it, None if the folder is empty or missing.

        Raises `UserError` if it holds something else.
        """
        path = self.output / "manifest.json"
        if path.is_file():
            manifest = read_json(path, sealed_by(mapping(anything)), TAKE_ANOTHER)
            found, wanted = _made(manifest.get("made_from")), _made(json.loads(json.dumps(self.identity)))
            if found == wanted and is_read_alike(manifest):
                return manifest
            how = next(differences(found, wanted), "by another version")
            raise UserError(f"{self.output}: holds a dataset made otherwise ({how}); {TAKE_ANOTHER}")
        if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
            raise UserError(f"{self.output}: exists and is no dataset; {TAKE_ANOTHER}")
        return None


def _made(identity: Any) -> Any:
    """Return a job's `identity` without what samples do not depend on: places of files, how images are checked."""
    identity = content_of(identity)
    recipe = identity.get("recipe") if isinstance(identity, dict) else None
    if not isinstance(recipe, dict):
        return identity
    return {**identity, "recipe": {name: value for name, value in recipe.items() if name not in CHECK_FIELDS}}


def open_job(
    inputs: Sequence[Path], recipe: Recipe, output: Path, lines_per_part: int = ROWS_PER_PART, shared: bool = False
) -> PreprocessJob:
    """Read and hash the inputs. Raises `UserError` if they, the tokenizer or the image root are missing or damaged.

    `shared`: several processes run this job; the first leaves notes on the inputs for the others.
    """
    open_recipe(recipe)  # a bad tokenizer or template must fail here, not in every worker
    work = output.with_name(output.name + ".work")
    files = read_inputs(inputs, lines_per_part, work / "inputs" if shared else None, recipe.image_root)
    identity = {**_identity(files, recipe), "given": [str(path) for path in inputs]}
    digest = hashlib.sha256(json.dumps([identity, lines_per_part, READING, PARTS, *FURTHER_SIZES]).encode()).hexdigest()
    return PreprocessJob(files, recipe, output, identity, work / digest[:16])


def _identity(files: Sequence[InputFile], recipe: Recipe) -> dict[str, Any]:
    maker, fields = open_recipe(recipe), asdict(recipe)
    # Without sounds as in datasets made before models could hear.
    left_out = {"further"} if recipe.further else {"further", *OF_HEARING}
    fields = {name: value for name, value in fields.items() if name not in left_out}
    fields |= {one.name: asdict(rule) for one, rule in recipe.rules.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "inputs": [_input_identity(file) for file in files],
        "recipe": {
            **fields,
            "template": recipe.template if recipe.template in TEMPLATES else maker.template.digest,
            "shorten": list(recipe.shorten),
            "image_root": recipe.image_root and str(recipe.image_root.resolve()),
            "tokenizer": sha256_of(recipe.tokenizer),
            "special_tokens": maker.special_tokens,
        },
    }


def _input_identity(file: InputFile) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "sha256": file.sha256,
        "lines": file.lines,
        "image_root": file.root and str(file.root.resolve()),
        "weight": file.weight,
        "max_tiles": file.parts[0].max_tiles if file.parts else None,
    }
