"""What a compiled kernel takes from the hardware, read from its machine code by the tools that Triton brings."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton

# /*0a40*/ @!P0 BRA 0x9c0 ; with the address, the predicate, the operation and its operands.
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
# After these nothing follows, unless a predicate lets some threads pass.
ENDS = ("BRA", "BRX", "EXIT", "JMP", "RET")
PRODUCTS = ("HGMMA",)
# Loads and stores of a thread's own memory. Kernels that index no local arrays spill there, and do nothing else.
SPILLS = ("LDL", "STL")


@dataclass(frozen=True)
class Usage:
    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_memory_columns: int  # Blackwell's; a kernel that wants more than there are is compiled to a trap


@dataclass(frozen=True)
class Loop:
    instructions: int
    spills: int  # how many of them load or store what a thread spilled


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack frame) of a thread. These kernels index no local arrays, so the stack is spills."""
    text = _cuobjdump(cubin, "--dump-resource-usage")
    found = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text[:500]}")
    # A kernel may come in several parts; the largest counts.
    return max(int(registers) for registers, _ in found), max(int(stack) for _, stack in found)


def disassembly(cubin: bytes) -> str:
    return _cuobjdump(cubin, "--dump-sass")


def _cuobjdump(cubin: bytes, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def product_loops(text: str) -> list[Loop]:
    """The innermost loops that hold matrix products, in the order of the disassembly."""
    operations = {int(address, 16): name.split(".")[0] for address, _, name, _ in INSTRUCTION.findall(text)}
    loops = [body for body in _loops(text) if any(operations[address] in PRODUCTS for address in body)]
    innermost = [body for body in loops if not any(other < body for other in loops)]
    return [
        Loop(len(body), sum(operations[address] in SPILLS for address in body)) for body in sorted(innermost, key=min)
    ]


def _loops(text: str) -> Iterator[frozenset[int]]:
    """The addresses of each natural loop: what can reach a jump to the loop's head without passing the head.

    The compiler moves waits out of the code that they interrupt. Their jumps lead back as a loop's do, but not to a head
    that is passed first: what can reach them goes back to an entry, of the kernel or of a partition that is jumped to
    by a table. An entry is what no earlier address leads to.
    """
    before, jumps = _edges(text)
    loops: dict[int, set[int]] = defaultdict(set)
    for source, head in jumps:
        body, ahead = {head}, [source]
        while ahead:
            address = ahead.pop()
            if address not in body:
                body.add(address)
                ahead += before[address]
        if all(min(before[address], default=address) < address for address in body - {head}):
            loops[head] |= body
    return map(frozenset, loops.values())


def _edges(text: str) -> tuple[dict[int, list[int]], list[tuple[int, int]]]:
    """(address -> addresses that come before it, jumps as (from, to)). Targets of indirect jumps are not known."""
    before: dict[int, list[int]] = {}
    jumps = []
    falls_from = None
    for written, predicate, name, operands in INSTRUCTION.findall(text):
        address, operation = int(written, 16), name.split(".")[0]
        before[address] = [] if falls_from is None else [falls_from]
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if operation == "BRA" else None
        if target:
            jumps.append((address, int(target[1], 16)))
        falls_from = None if operation in ENDS and not predicate else address
    for source, target_address in jumps:
        before[target_address].append(source)
    return before, jumps
