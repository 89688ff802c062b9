"""Pickles that try to run code, change classes or cost much; and a generator of programs for pickle's machine."""

import pickle
import pickletools
import random
from collections.abc import Iterator

METADATA, PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
START = b"\x80\x04"


def text(word: str) -> bytes:
    body = word.encode()
    return b"X" + len(body).to_bytes(4, "little") + body


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def dictionary(**pairs: bytes) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in pairs.items()) + b"u"


KIND, LAYOUT, GETATTR = (
    named(PLANNER, "WriteItemType"), named("torch.serialization", "_get_layout"), named("builtins", "getattr"),
)  # fmt: skip
SIZE, ORDERED, ROOT = named("torch", "Size"), named("collections", "OrderedDict"), named("pathlib", "PosixPath")
INDEX, TABLE = named(METADATA, "MetadataIndex"), named(METADATA, "Metadata")
RUN = "__import__('builtins')._ran.append(1)"


def attribute(of: bytes, name: str) -> bytes:
    return GETATTR + of + text(name) + b"\x86R"


def called(function: bytes, word: str) -> bytes:
    return function + text(word) + b"\x85R"


def new_members() -> bytes:
    """An enumeration's members become what the file says, which a later getattr believes."""
    return KIND + b"N" + dictionary(_member_map_=dictionary(__init__=KIND, __globals__=KIND, get=LAYOUT)) + b"\x86b"


def walk_to_eval() -> bytes:
    """From a class's `__init__` by getattr to builtins.eval."""
    space = attribute(attribute(KIND, "__init__"), "__globals__")
    builtins = called(attribute(space, "get"), "__builtins__")
    return called(called(attribute(builtins, "get"), "eval"), RUN)


ATTACKS: dict[str, bytes] = {
    "attributes of a class": new_members(),
    "attributes of a function": LAYOUT + dictionary(cache=dictionary(eval=ROOT)) + b"b",
    "attributes of a class, by a dictionary": TABLE + dictionary(__init__=KIND) + b"b",
    "attributes of a name": SIZE + b"N" + dictionary(call=KIND) + b"\x86b",
    "a walk to eval": walk_to_eval(),
    "new members, then a walk to eval": new_members() + b"0" + walk_to_eval(),
    "a walk to eval by one dotted name": called(named(PLANNER, "WriteItemType.__init__.__globals__"), "eval"),
    "exec": called(named("builtins", "exec"), RUN),
    "exec as an instance": b"(" + text(RUN) + b"ibuiltins\nexec\n",
    "exec as an object": b"(" + named("builtins", "exec") + text(RUN) + b"o",
    "exec by a name of Python 2": called(named("__builtin__", "eval"), RUN),
    "a registered extension": b"\x82\x01",
    "a persistent name": text("x") + b"Q",
    "a buffer from elsewhere": b"\x97",
    "a set of what is no hash": b"\x8f(]\x90",
    "items of an enumeration": KIND + text("TENSOR") + b"K\x01s",
    "items appended to a name": KIND + b"(K\x01e",
    "an instance by keywords": INDEX + b")}\x92",
    "a class of arguments": INDEX + text("x") + b"\x85\x81",
    "an enumeration of a text": called(KIND, "TENSOR"),
    "an ordered dictionary of another": ORDERED + b"](" + text("a") + b"K\x01\x86e\x85R",
    "a number of a gigabyte": b"\x8b\xff\xff\xff\x3f" + bytes(64),
    "a text of four gigabytes": b"X\xff\xff\xff\xff" + bytes(64),
    "bytes without end": b"\x8e" + b"\xff" * 8 + bytes(64),
    "an array without end": b"\x96\x00\x00\x00\x00\x01\x00\x00\x00" + bytes(64),
    "lists in lists": b"]" * 200_000 + b"a" * 199_999,
    "tuples in tuples as a name": b"})" + b"\x85" * 200_000 + b"K\x01s",
    "a list that is its own": b"]\x94h\x00a",
    "lists of twice the list before": b"]\x94" + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94"
                                                        for i in range(60)),
    "many sizes of one long tuple": b"(" + b"K\x01" * 50_000 + b"t\x94" + (SIZE + b"h\x00\x85R") * 2_000,
    "a size below zero": SIZE + b"J\xff\xff\xff\xff\x85\x85R",
    "a path of many parts": ROOT + b"(" + text("a" * 2_000) * 200 + b"tR",
    "marks without end": b"(" * 500_000,
    "more than one end": b"N" * 9,
    "a layout that nobody has": called(LAYOUT, "torch.eval"),
}  # fmt: skip
"""By what they try; each is a whole program but for its start and its end."""


def whole(body: bytes) -> bytes:
    return START + body + b"."


def pieces(program: bytes) -> list[bytes]:
    """A program's instructions, without frames."""
    found = [(code.name, place) for code, _, place in pickletools.genops(program)]
    ends = [place for _, place in found[1:]] + [len(program)]
    return [
        program[place:end] for (name, place), end in zip(found, ends, strict=True) if name not in ("FRAME", "PROTO")
    ]


def drawn(genuine: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Programs: genuine ones with instructions put in, exchanged or left out, and others that keep to the stack."""
    draws, parts = random.Random(seed), pieces(genuine)[:-1]
    values = [b"N", b"\x88", b"K\x02", b"J\xff\xff\xff\xff", text("links.a"), text("../../etc/passwd"), b")", b"]",
              b"}", SIZE + b"K\x03\x85\x85R", KIND, KIND + b"K\x01\x85R", LAYOUT, GETATTR, SIZE, ORDERED, ROOT, INDEX,
              TABLE, INDEX + b")\x81", TABLE + b")\x81", named("torch", "float32"), named("os", "system"),
              named("builtins", "eval"), named("torch", "ops"), attribute(KIND, "TENSOR")]  # fmt: skip
    values += [attack for attack in ATTACKS.values() if len(attack) < 2_000]
    ones = [b"b", b"R", b"\x81", b"\x85", b"0", b"2", b"\x94", b"Q", b"\x93", b"a", b"s", b"h\x00", b"h\x05", b"q\x00"]
    every = [code.code.encode("latin-1") for code in pickletools.opcodes]
    more = [*values, *ones, *ones, b"(", b"t", b"u", b"e", *every]
    for _ in range(count):
        if draws.randrange(3):
            body = list(parts)
            for _ in range(draws.randint(1, 3)):
                at, kind = draws.randrange(len(body)), draws.randrange(5)
                with_it = draws.choice(values) if draws.randrange(3) else draws.choice(ones + every)
                if kind == 0:
                    del body[at]
                elif kind == 1:
                    body[at] = with_it
                elif kind == 2:
                    body[at] = draws.choice(body)
                elif kind == 3:
                    body[at : at + 1] = [_changed(body[at], draws)]
                else:
                    body.insert(at, with_it)
        else:
            body = draws.choices(values, k=draws.randint(1, 4)) + draws.choices(more, k=draws.randint(1, 9))
        yield START + b"".join(body) + pickle.STOP


def _changed(piece: bytes, draws: random.Random) -> bytes:
    """An instruction of the same length whose argument is another."""
    if len(piece) < 2:
        return piece
    changed = bytearray(piece)
    changed[draws.randrange(1, len(piece))] = draws.choice([0, 1, 2, 46, 47, 97, 255])
    return bytes(changed)
