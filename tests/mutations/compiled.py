"""What numba has compiled, in `__pycache__` beside the sources, is put aside where a fault reaches it.

Numba compiles a function again when its own file has changed, not when a function of another file has that it calls, or
a constant that it reads: they are compiled into it.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@contextmanager
def put_aside(file: str, copy: Path, folder: Path) -> Iterator[None]:
    """While there is a fault in `file` nothing is there that was compiled without it; afterwards nothing with it."""
    reached = {copy / name for name in _reached(file, copy)}
    moved = {path: folder / str(number) for number, path in enumerate(_files(reached))}
    for path, place in moved.items():
        path.rename(place)
    try:
        yield
    finally:
        for path in _files(reached):
            path.unlink()
        for path, place in moved.items():
            place.rename(path)


def _files(sources: set[Path]) -> list[Path]:
    """What is compiled of them: __pycache__/module.function-line.python.nbi, and .nbc."""
    return [file for path in sources for file in (path.parent / "__pycache__").glob(f"{path.stem}.*.nb?")]


def _reached(file: str, copy: Path) -> set[str]:
    """The file, if it has compiled functions or constants of others', and those that have its own compiled in."""
    compiled, imports = _compiled(copy)
    found, new = set[str](), {file}
    while new:
        found |= new
        own = {(name.removesuffix(".py").replace("/", "."), word) for name in new for word in compiled.get(name, ())}
        new = {name for name, words in imports.items() if words & own} - found
    return found if len(found) > 1 or "njit" in (copy / file).read_text(encoding="utf-8") else set()


@cache
def _compiled(copy: Path) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[tuple[str, str]]]]:
    """Of every file its compiled functions and constants; and what it imports, as (module, name)."""
    compiled, imports = {}, {}
    for path in (copy / "omnibal_ext").rglob("*.py"):
        name, tree = str(path.relative_to(copy)), ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        words = {f.name for f in functions if any("njit" in ast.unparse(one) for one in f.decorator_list)}
        words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.isupper()}
        compiled[name] = frozenset(words)
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imports[name] = frozenset((str(node.module), alias.name) for node in froms for alias in node.names)
    return compiled, imports
