"""The house keeps its floors: imports go one way, and what must stay light stays light."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Ground first; a module imports only from its own floor or floors below. The longest matching name counts.
FLOORS = [
    ("omnibal_ext",),
    (
        "megatron.vlm.compiling", "megatron.vlm.no_cuda", "megatron.vlm.optional", "megatron.vlm.core_patches",
        "megatron.vlm.platform",
        "megatron.vlm.log_noise", "megatron.vlm.ending",
        "megatron.vlm.flags", "megatron.vlm.evaluation", "megatron.vlm.defaults", "megatron.vlm.arguments",
        "megatron.vlm.pixels", "megatron.vlm.media", "megatron.vlm.microbatch", "megatron.vlm.loss",
        "megatron.vlm.rates",
    ),
    ("megatron.vlm.models", "megatron.vlm.data", "megatron.vlm.families", "megatron.vlm.checkpoint"),
    ("megatron.vlm.pipeline", "megatron.vlm.preprocessing"),
    ("megatron.vlm.single", "megatron.vlm.hf", "megatron.vlm.prove"),
    ("megatron.vlm.profiling",),
    ("megatron.vlm.monitoring", "megatron.vlm.weights"),
    ("megatron.vlm.preflight",),
    ("megatron.vlm.pretrain",),
    ("tools",),
]  # fmt: skip
# Neighbours on one floor that must not know each other.
APART = [
    ("megatron.vlm.models", "megatron.vlm.data"), ("megatron.vlm.data", "megatron.vlm.models"),
    ("megatron.vlm.preprocessing", "megatron.vlm.models"), ("megatron.vlm.preprocessing", "megatron.vlm.pipeline"),
    ("megatron.vlm.pipeline", "megatron.vlm.preprocessing"),
]  # fmt: skip


ROOMS = ("omnibal_ext", "megatron/vlm", "tools", "benchmarks", "examples")


@functools.cache
def modules(rooms: Sequence[str] = ROOMS[:3]) -> dict[str, Path]:
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """What a file imports, as full names; names imported from a package count as modules where they are."""
    known = modules(ROOMS)
    for node in ast.walk(parsed(path)):
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


def test_a_floor_imports_only_from_floors_below() -> None:
    assert not [fault for module, path in modules().items() for fault in wrong_imports(module, path)]


def wrong_imports(module: str, path: Path) -> Iterator[str]:
    """What a module imports from a floor above its own, or from a neighbour that it must not know."""
    # `megatron.vlm` readies the machine, so it knows the ground floor only
    here = floor("megatron.vlm.platform" if module == "megatron.vlm" else module)
    if here is None:
        yield f"{module} stands on no floor; give it one in FLOORS"
        return
    for imported in imports(path):
        there = floor(imported)
        if there is not None and there > here:
            yield f"{module} imports {imported} from a floor above"
        if any(module.startswith(one + ".") and imported.startswith(other + ".") for one, other in APART):
            yield f"{module} imports {imported}: these two stay apart"


def test_no_import_goes_in_a_circle() -> None:
    known = modules(ROOMS)
    graph = {module: {name for name in imports(path) if name in known} for module, path in known.items()}
    list(TopologicalSorter(graph).static_order())


def test_data_and_models_do_not_meet_in_the_folders_of_families() -> None:
    """Loading a dataset must not load a core's layers, nor a layer what reads images."""
    known = modules()
    for start, apart in (
        ("megatron.vlm.data.", "megatron.vlm.models."),
        ("megatron.vlm.models.", "megatron.vlm.data."),
    ):
        reached: set[str] = set()
        ahead = {module for module in known if module.startswith(start)}
        while ahead:
            reached |= ahead
            ahead = {name for module in ahead for name in imports(known[module]) if name in known} - reached
        assert not [module for module in reached if module.startswith(apart)]


def test_the_face_of_a_package_imports_nothing_of_it() -> None:
    """It runs before each of its modules, so what it imports would be imported in a circle; a function's runs later."""
    for module, path in modules(ROOMS).items():
        # These ready the machine, and what is compiled, before all others.
        if path.name == "__init__.py" and module not in ("megatron.vlm", "omnibal_ext"):
            at_once = {node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom)}
            assert not [node for node in at_once if module in ast.unparse(node)], module


def test_public_names_have_docstrings() -> None:
    bare = []
    for module, path in modules(ROOMS).items():
        tree = parsed(path)
        bare += [] if ast.get_docstring(tree) else [module]
        bare += [f"{module}.{name}" for name in names_without_docstring(tree)]
    assert not bare


def names_without_docstring(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Public functions, classes and methods of a scope that say nothing of themselves."""
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if node.name != "main" and not ast.get_docstring(node):
                yield node.name
            if isinstance(node, ast.ClassDef):
                yield from names_without_docstring(node)


def test_the_deciding_part_never_loads_torch_or_a_trainer() -> None:
    names = [module for module in modules() if module.startswith("omnibal_ext")]
    heavy = {"torch", "megatron", "swift", "nemo_automodel", "veomni", "llamafactory", "axolotl", "transformers",
             "lightning"}  # fmt: skip
    code = "import sys; " + "; ".join(f"import {name}" for name in names)
    code += f"; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_megatron_stays_a_namespace() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    import megatron

    assert getattr(megatron, "__file__", None) is None
