"""Reads a table of contents without Python's unpickler, which calls and changes whatever classes a file names.

A pickle is a program for a machine with a stack. This machine has only the instructions that write plain values and
instances of the classes in `contents.py`, of protocols 2 to 5. On its stack are no classes, functions or modules, so a
file cannot set their attributes; it fills lists, dictionaries and empty instances, each once. Time and memory are in
proportion to the file's size.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.vlm.checkpoint.contents import MOST_PARTS, NAMES, RECORDS, SHARED, TABLES, Name

Instruction = Callable[["_Machine", int], int]
_KEPT = object()
"""Stand-in, in the memo, for what may not be referred to again."""
_STOP = pickle.STOP[0]


def unpickle(data: bytes) -> Any:
    """Read a save's table of contents, without running code. Raises UnpicklingError for other or damaged pickles."""
    return _Machine(data).run()


class _Machine:
    """Interpreter of a pickle: an instruction takes the place in `data` behind its code, and returns the next one's."""

    __slots__ = ("data", "marks", "memo", "stack", "unfilled")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.unfilled = 0
        """Instances without their fields so far."""

    def run(self) -> Any:
        data, at = self.data, 0
        try:
            while (code := data[at]) != _STOP:
                at = INSTRUCTIONS[code](self, at + 1)
        except (IndexError, ValueError):  # reading beyond the end is noticed by the next instruction
            at = len(data)
        if at + 1 != len(data) or len(self.stack) != 1 or self.marks or self.unfilled:
            raise pickle.UnpicklingError("it is cut off or damaged")
        if type(self.stack[0]) not in TABLES:
            raise pickle.UnpicklingError("it is no table of contents")
        return self.stack[0]

    def number(self, at: int, width: int) -> int:
        """Read an unsigned integer of `width` bytes."""
        return int.from_bytes(self.data[at : at + width], "little")

    def marked(self) -> list[Any]:
        """Remove the last mark and what lies above it from the stack; return the latter."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


def _skip(width: int) -> Instruction:
    """Return the instruction that skips `width` bytes, of PROTO or FRAME, which change nothing here."""
    return lambda _, at: at + width


def _push(make: Callable[[], Any]) -> Instruction:
    def push(machine: _Machine, at: int) -> int:
        machine.stack.append(make())
        return at

    return push


def _byte(machine: _Machine, at: int) -> int:
    machine.stack.append(machine.data[at])
    return at + 1


def _integer(width: int, signed: bool) -> Instruction:
    def push(machine: _Machine, at: int) -> int:
        end = at + width
        machine.stack.append(int.from_bytes(machine.data[at:end], "little", signed=signed))
        return end

    return push


def _long(machine: _Machine, at: int) -> int:
    if (width := machine.data[at]) > 8:
        raise pickle.UnpicklingError("a number has more than 64 bits")
    return _integer(width, signed=True)(machine, at + 1)


def _text(width: int) -> Instruction:
    """Return the instruction that pushes a text behind its length of `width` bytes."""

    def push(machine: _Machine, at: int) -> int:
        start = at + width
        end = start + machine.number(at, width)
        machine.stack.append(str(machine.data[start:end], "utf-8", "surrogatepass"))
        return end

    return push


def _mark(machine: _Machine, at: int) -> int:
    machine.marks.append(len(machine.stack))
    return at


def _tuple(machine: _Machine, at: int) -> int:
    machine.stack.append(tuple(machine.marked()))
    return at


def _tuple_of(count: int) -> Instruction:
    def make(machine: _Machine, at: int) -> int:
        items = tuple(machine.stack[-count:])
        if len(items) < count:
            raise IndexError
        machine.stack[-count:] = [items]
        return at

    return make


def _append(machine: _Machine, at: int) -> int:
    value = machine.stack.pop()
    _extend(machine, [value])
    return at


def _appends(machine: _Machine, at: int) -> int:
    _extend(machine, machine.marked())
    return at


def _extend(machine: _Machine, values: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        raise pickle.UnpicklingError("it appends to what is no list")
    target.extend(values)


def _set_item(machine: _Machine, at: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set(machine, [key], [value])
    return at


def _set_items(machine: _Machine, at: int) -> int:
    items = machine.marked()
    _set(machine, items[::2], items[1::2])
    return at


def _set(machine: _Machine, keys: list[Any], values: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not dict and type(target) is not OrderedDict:
        raise pickle.UnpicklingError("it sets items of what is no dictionary")
    for key in keys:
        if type(key) is not str and not (type(key) is MetadataIndex and vars(key)):
            raise pickle.UnpicklingError("a dictionary has a key that is no name")
    if len(keys) != len(values):
        raise IndexError
    target.update(zip(keys, values, strict=True))


def _memoize(machine: _Machine, at: int) -> int:
    value = machine.stack[-1]
    kind = type(value)
    is_shared = kind in SHARED or (
        kind is tuple and len(value) <= MOST_PARTS and all(type(one) in SHARED for one in value)
    )
    machine.memo.append(value if is_shared else _KEPT)
    return at


def _put(width: int) -> Instruction:
    def put(machine: _Machine, at: int) -> int:
        if machine.number(at, width) != len(machine.memo):
            raise pickle.UnpicklingError("it numbers its values as no writer does")
        return _memoize(machine, at + width)

    return put


def _get(width: int) -> Instruction:
    def get(machine: _Machine, at: int) -> int:
        end = at + width
        value = machine.memo[int.from_bytes(machine.data[at:end], "little")]
        if value is _KEPT:
            raise pickle.UnpicklingError("it refers twice to what a checkpoint has once")
        machine.stack.append(value)
        return end

    return get


def _global(machine: _Machine, at: int) -> int:
    middle = machine.data.find(b"\n", at) + 1
    end = machine.data.find(b"\n", middle) + 1
    if not 0 < middle < end:
        raise IndexError
    module, name = (str(machine.data[start : stop - 1], "utf-8") for start, stop in ((at, middle), (middle, end)))
    machine.stack.append(_named(module, name))
    return end


def _stack_global(machine: _Machine, at: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(_named(module, name))
    return at


def _named(module: Any, name: Any) -> Any:
    if type(module) is not str or type(name) is not str:
        raise pickle.UnpicklingError("a name is no text")
    if (module, name) not in NAMES:
        raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}, which no checkpoint needs")
    return NAMES[module, name]


def _reduce(machine: _Machine, at: int) -> int:
    arguments, name = machine.stack.pop(), machine.stack[-1]
    if type(name) is not Name or name.call is None or type(arguments) is not tuple:
        raise pickle.UnpicklingError("it calls what no checkpoint needs to call")
    try:
        machine.stack[-1] = name.call(*arguments)
    except TypeError:  # of more or fewer arguments
        raise pickle.UnpicklingError("it calls what no checkpoint needs to call") from None
    return at


def _new(machine: _Machine, at: int) -> int:
    arguments, name = machine.stack.pop(), machine.stack[-1]
    if type(name) is not Name or name.record is None or arguments != ():
        raise pickle.UnpicklingError("it makes an instance of what no checkpoint needs one of")
    machine.stack[-1] = object.__new__(name.record.kind)
    machine.unfilled += bool(name.record.required)
    return at


def _build(machine: _Machine, at: int) -> int:
    state, instance = machine.stack.pop(), machine.stack[-1]
    record = RECORDS.get(type(instance))
    if record is None:
        raise pickle.UnpicklingError("it sets attributes of what is no instance of a checkpoint's classes")
    record.fill(instance, state)
    machine.unfilled -= bool(record.required)
    return at


def _unneeded(machine: _Machine, at: int) -> int:
    raise pickle.UnpicklingError(f"its instruction {machine.data[at - 1]:#04x} is one that no checkpoint needs")


_KNOWN: dict[bytes, Instruction] = {
    pickle.PROTO: _skip(1), pickle.FRAME: _skip(8),
    pickle.NONE: _push(lambda: None), pickle.NEWTRUE: _push(lambda: True), pickle.NEWFALSE: _push(lambda: False),
    pickle.BININT1: _byte, pickle.BININT2: _integer(2, False), pickle.BININT: _integer(4, True), pickle.LONG1: _long,
    pickle.SHORT_BINUNICODE: _text(1), pickle.BINUNICODE: _text(4),
    pickle.EMPTY_LIST: _push(list), pickle.APPEND: _append, pickle.APPENDS: _appends,
    pickle.EMPTY_DICT: _push(dict), pickle.SETITEM: _set_item, pickle.SETITEMS: _set_items,
    pickle.MARK: _mark, pickle.TUPLE: _tuple, pickle.EMPTY_TUPLE: _push(tuple),
    pickle.TUPLE1: _tuple_of(1), pickle.TUPLE2: _tuple_of(2), pickle.TUPLE3: _tuple_of(3),
    pickle.MEMOIZE: _memoize, pickle.BINPUT: _put(1), pickle.LONG_BINPUT: _put(4),
    pickle.BINGET: _get(1), pickle.LONG_BINGET: _get(4),
    pickle.GLOBAL: _global, pickle.STACK_GLOBAL: _stack_global,
    pickle.REDUCE: _reduce, pickle.NEWOBJ: _new, pickle.BUILD: _build,
}  # fmt: skip
INSTRUCTIONS = [_KNOWN.get(bytes([code]), _unneeded) for code in range(256)]
"""Methods by the code of their instruction."""
