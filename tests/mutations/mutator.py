"""Random faults: comparisons, signs, and / or, numbers, arguments, `not`, calls and the end of functions go wrong."""

import ast
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import calls
from faults import ROOT, Fault

OTHER: dict[type, type] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
OTHER |= {ast.Add: ast.Sub, ast.And: ast.Or}
OTHER |= {new: old for old, new in OTHER.items()}
LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)
"""Wording, our own logic, text in 3.11's places, defaults."""


def draw(count: int, seed: int, since: str | None) -> list[Fault]:
    """So many faults in the product, or in what of it has changed since a commit, each with the tests that run it."""
    git = ["ls-files"] if since is None else ["diff", "--name-only", "--relative", since]
    command = ["git", *git, "--", *calls.ROOMS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [name for name in listed if name.endswith(".py") and (ROOT / name).exists()]
    found = [pair for name in files for pair in faults_of(name, (ROOT / name).read_text(encoding="utf-8"))]
    known = calls.read_map()
    drawn = random.Random(seed).sample(found, min(count, len(found)))
    return [replace(fault, tests=calls.tests_of(fault.file, lines, known)) for fault, lines in drawn]


def faults_of(name: str, source: str) -> Iterator[tuple[Fault, range]]:
    """All there are in the functions of a file, each with the lines from the beginning of the outermost function."""
    lines = source.splitlines(keepends=True)
    for function in _functions(ast.parse(source)):
        first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
        for node in (inner for statement in function.body for inner in _within(statement)):
            for new in _variants(node):
                if ast.unparse(new) == ast.unparse(node):  # two equal arguments
                    continue
                at = _place(lines, node.lineno, node.col_offset)
                old = source[at : _place(lines, node.end_lineno, node.end_col_offset)]
                text = ast.unparse(new)
                if isinstance(new, ast.Compare | ast.BinOp | ast.BoolOp | ast.IfExp):
                    text = f"({text})"
                yield Fault(f"{name}:{node.lineno}", name, old, text, (), at), range(first, node.lineno + 1)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node)


def _within(node: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """A statement or expression and all in it, but what is to be left alone."""
    if isinstance(node, LEFT_ALONE):
        return
    if isinstance(node, ast.stmt | ast.expr):
        yield node
    for field, inner in ast.iter_fields(node):
        for one in inner if isinstance(inner, list) else [inner]:
            if isinstance(one, ast.AST) and field not in ("annotation", "returns", "decorator_list"):
                yield from _within(one)


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in the place of a node where it goes wrong."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in OTHER:
            yield ast.Compare(left, [OTHER[type(op)]()], [right])
        case ast.BinOp(left, (ast.Add() | ast.Sub()) as op, right):
            yield ast.BinOp(left, OTHER[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(OTHER[type(op)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(int(value)) if not isinstance(value, bool):
            yield ast.Constant(value + 1)
        case ast.Call(func, [first, second, *rest], keywords) if not isinstance(first, ast.Starred):
            yield ast.Call(func, [second, first, *rest], keywords)
        case ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Assign() | ast.AugAssign():
            yield ast.Return()


def _place(lines: list[str], line: int | None, column: int | None) -> int:
    """In the text, of a place that `ast` gives: its columns are bytes."""
    assert line is not None
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())
