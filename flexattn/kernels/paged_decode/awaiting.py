"""PTX of a merge whose data is its own flag: who leaves a part, and who waits for its words.

A word of the workspace that no one has written holds EMPTY, which no result is. A part is stored
without fence or counter; who merges it reads its words until none of them is EMPTY. Parts are
awaited from programs of lower number alone: blocks start in the order of their numbers, as the
decoupled look-back of Merrill and Garland's prefix sum takes for granted too. Where lengths change
under a launch a word may never come: who has asked for it TURNS times goes on without, which makes
its rows NaN, and stores 1 in the host's memory. Each word is stored
once, by one thread: a second store of it could land after who merges has left EMPTY there again,
and then the next launch would take it for a word of its own.
"""

from __future__ import annotations

# Of a word as a signed number: a NaN, but not the one that arithmetic gives, 0x7FFFFFFF.
UNWRITTEN = -1
# How often a word is asked for: two seconds or so, and no launch takes a tenth of that.
TURNS = 1 << 21
# Words that a thread waits for at a time; they are registers of it.
_HELD = 16


def await_context(vector: int, vectors: int, threads: int, columns: int) -> dict[str, object]:
    """What the template says of it: a thread has `vectors` vectors of `vector` words in a tensor.

    An element is a vector of a part's output, with its row's weight. threads: a power of two of
    them share a row, numbered from a multiple of it. columns: of a row; threads beyond its vectors
    hold what the first ones do.
    """
    loads = next(n for n in range(min(vectors, _HELD), 0, -1) if vectors % n == 0)
    return {
        "vector": vector,
        "words_of": ", ".join(f"v{c}" for c in range(vector)),
        "poll_asm": _poll(vector, loads),
        "poll_constraints": ",".join(
            ["=&r"] * ((vector + 1) * loads) + ["l"] * (2 * loads) + ["r"] * loads + ["l"] * loads
        ),
        "poll_pack": loads,
        "store_asm": (
            "{ .reg .pred wanted, own, first; .reg .b32 thread;",
            f"setp.ne.s32 wanted, ${vector + 4}, 0;",
            "mov.u32 thread, %tid.x;",
            f"and.b32 thread, thread, {threads - 1};",
            f"setp.lt.and.u32 own, thread, {columns // vector}, wanted;",
            "setp.eq.and.u32 first, thread, 0, wanted;",
            f"@own st.relaxed.gpu.global{_wide(vector)}.b32 [$1], {_group(range(3, vector + 3))};",
            f"@first st.relaxed.gpu.global.b32 [$2], ${vector + 3};",
            "mov.u32 $0, 0; }",
        ),
        "store_constraints": ",".join(["=r", "l", "l", *["r"] * (vector + 2)]),
    }


def _poll(vector: int, loads: int) -> tuple[str, ...]:
    """Ask for all words, and again as long as one of them is EMPTY: the largest there is.

    After TURNS times 1 is stored where the last operand says.
    """
    inputs = (vector + 1) * loads
    words = [[c * loads + i for c in range(vector + 1)] for i in range(loads)]
    lines = [f"{{ .reg .pred wanted<{loads}>, again; .reg .b32 turns, top<{inputs}>;"]
    lines.append("mov.b32 turns, 0;")
    for i, each in enumerate(words):
        lines.append(f"setp.ne.s32 wanted{i}, ${inputs + 2 * loads + i}, 0;")
        lines += [f"mov.b32 ${word}, 0;" for word in each]
    lines.append("ASK:")
    for i, each in enumerate(words):
        lines.append(
            f"@wanted{i} ld.relaxed.gpu.global{_wide(vector)}.b32 {_group(each[:-1])}, "
            f"[${inputs + i}];"
        )
        lines.append(f"@wanted{i} ld.relaxed.gpu.global.b32 ${each[-1]}, [${inputs + loads + i}];")
    found = [f"${word}" for each in words for word in each]
    made = 0
    while len(found) > 1:
        pairs = []
        for a, b in zip(found[::2], found[1::2], strict=False):
            lines.append(f"max.u32 top{made}, {a}, {b};")
            pairs.append(f"top{made}")
            made += 1
        found = pairs + found[len(pairs) * 2 :]
    lines += [
        f"setp.eq.s32 again, {found[0]}, {UNWRITTEN};",
        "add.u32 turns, turns, 1;",
        f"setp.lt.and.u32 again, turns, {TURNS}, again;",
        "@again bra ASK;",
        f"setp.eq.s32 again, {found[0]}, {UNWRITTEN};",
        f"@again st.relaxed.sys.global.b32 [${inputs + 3 * loads}], 1; }}",
    ]
    return tuple(lines)


def _wide(vector: int) -> str:
    return "" if vector == 1 else f".v{vector}"


def _group(words: range | list[int]) -> str:
    names = ", ".join(f"${word}" for word in words)
    return names if len(words) == 1 else f"{{{names}}}"
