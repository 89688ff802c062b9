"""The house keeps its floors: imports go one way, and what must stay light stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Ground first; a module imports only from its own floor or floors below. The longest matching name counts.
FLOORS = [
    ("omnibal_ext",),
    (
        "megatron.vlm.platform",
        "megatron.vlm.log_noise",
        "megatron.vlm.ending",
        "megatron.vlm.flags",
        "megatron.vlm.evaluation",
        "megatron.vlm.arguments",
        "megatron.vlm.microbatch",
        "megatron.vlm.loss",
    ),
    ("megatron.vlm.models", "megatron.vlm.data"),
    ("megatron.vlm.pipeline",),
    ("megatron.vlm.single", "megatron.vlm.hf"),
    ("megatron.vlm.profiling",),
    (
        "megatron.vlm.profiler",
        "megatron.vlm.journal",
        "megatron.vlm.meters",
        "megatron.vlm.drift",
        "megatron.vlm.generate",
        "megatron.vlm.weights",
    ),
    ("megatron.vlm.preflight",),
    ("megatron.vlm.pretrain",),
    ("tools",),
]
# Neighbours on one floor that must not know each other.
APART = [("megatron.vlm.models", "megatron.vlm.data"), ("megatron.vlm.data", "megatron.vlm.models")]


def modules() -> dict[str, Path]:
    files = [path for room in ("omnibal_ext", "megatron/vlm", "tools") for path in (ROOT / room).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(path: Path) -> Iterator[str]:
    """What a file imports, as full names; names imported from a package count as modules where they are."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in known else node.module


def floor(module: str) -> int | None:
    prefixes = [(name, number) for number, names in enumerate(FLOORS) for name in names]
    found = [(len(name), number) for name, number in prefixes if module == name or module.startswith(name + ".")]
    return max(found)[1] if found else None


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_floor_imports_only_from_floors_below(module: str) -> None:
    here = floor(module)
    if module == "megatron.vlm":  # readies the machine, so it knows the ground floor only
        here = floor("megatron.vlm.platform")
    assert here is not None, f"{module} stands on no floor; give it one in FLOORS"
    for imported in imports(modules()[module]):
        there = floor(imported)
        assert there is None or there <= here, f"{module} imports {imported} from a floor above"
        for one, other in APART:
            crosses = module.startswith(one + ".") and imported.startswith(other + ".")
            assert not crosses, f"{module} imports {imported}: these two stay apart"


def test_no_import_goes_in_a_circle() -> None:
    known = modules()
    graph = {module: {name for name in imports(path) if name in known} for module, path in known.items()}
    list(TopologicalSorter(graph).static_order())


def test_the_deciding_part_never_loads_torch() -> None:
    names = [module for module in modules() if module.startswith("omnibal_ext")]
    code = "import sys; " + "; ".join(f"import {name}" for name in names)
    code += "; loaded = {'torch', 'megatron'} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_megatron_stays_a_namespace() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    import megatron

    assert getattr(megatron, "__file__", None) is None
