"""PTX of one consumer that becomes that of all, and the stages of a compile that do it."""

import hashlib
import re
import threading
from types import SimpleNamespace

import pytest
from triton import knobs

from flexattn.errors import RenderError
from flexattn.kernels.hopper.merge_consumers import (
    ALONE,
    FORM,
    NAME,
    announcement,
    block_warps,
    merged,
)
from flexattn.kernels.ptx import stages as compiling
from flexattn.kernels.ptx.stages import Stages, compiled_by

WAIT = "\tmbarrier.try_wait.parity.shared.b64 complete, [%r20], %r21;\n"
MEETING = "\tbar.sync \t0, 128;\n"


# Where the warps part: as Triton 3.6 writes it, and as 3.9 does.
PARTS = {
    "3.6": "\t@%p1 bra \t$L__BB0_2;\n\tbra.uni \t$L__BB0_1;\n$L__BB0_1:\n",
    "3.9": "\t@!%p1 bra \t$L__BB0_1;\n\tbra.uni \t$L__BB0_2;\n$L__BB0_1:\n",
}
PASS = "hopper.merge_consumers"
MERGE = Stages((PASS,))


def ptx(consumers=3, parts="3.6"):
    """What Triton writes around the work of one consumer and of the producer warps."""
    return f""".reqntid 256
.maxnreg 256
{{
\t.reg .pred \t%p<9>;
\t.reg .b32 \t%r<99>;
\tmov.u32 \t%r1, %tid.x;
\tshr.u32 \t%r2, %r1, 5;
\tshfl.sync.idx.b32 \t%r3, %r2, 0, 31, -1;
\tsetp.lt.u32 \t%p1, %r3, 4;
{PARTS[parts]}\tbarrier.sync \t1;
\tadd.s32 \t%r4, %r5, %r3;
\tld.shared.b8 \t%r6, [%r4+64];
\tsetmaxnreg.dec.sync.aligned.u32 \t32;
\tbarrier.sync \t1;
\tbar.sync %r9, 416; mov.b32 %r8, 0;
\tsetmaxnreg.inc.sync.aligned.u32 \t256;
$L__BB0_2:
\tsetmaxnreg.inc.sync.aligned.u32 \t256;
\tbarrier.sync \t1;
\tsetmaxnreg.inc.sync.aligned.u32 \t256;
\tbarrier.sync \t1;
\tmov.u32 %r7, %tid.x; shr.u32 %r7, %r7, 7; // {announcement(consumers, 160)}
{MEETING}\tmov.b32 %r3, 0; // {ALONE}
\tadd.s32 \t%r20, %r22, 8;
{MEETING}{WAIT}{MEETING}{WAIT}\tbarrier.sync \t1;
\tsetmaxnreg.inc.sync.aligned.u32 \t256;
\tst.shared.b32 \t[global_smem+64], 3;
\tbarrier.sync \t1;
\tret;
}}
"""


@pytest.mark.parametrize("consumers", [2, 3])
def test_a_block_has_the_threads_and_registers_of_all_consumers(consumers):
    text = merged(ptx(consumers))
    threads = 128 * (consumers + 1)
    assert block_warps(text) == threads // 32
    assert f".reqntid {threads}\n" in text
    assert f".maxnreg {65536 // threads // 8 * 8}\n" in text
    # The consumers take registers once, behind the start of all work; the producers give some.
    assert re.findall(r"setmaxnreg\.(\w+)\S+ \t(\d+)", text) == [("dec", "32"), ("inc", "160")]
    taken = text.index("setmaxnreg.inc")
    assert text[:taken].endswith("\tbarrier.sync \t3;\n\t")
    assert text[taken:].split("\n")[1] == "\tbarrier.sync \t3;"


def test_consumers_are_the_first_warps_and_the_others_keep_their_places():
    text = merged(ptx())
    assert "\tsetp.lt.u32 \t%p1, %r3, 12;\n" in text
    told = text[text.index("\tmov.u32 \t%place, %tid.x;") : text.index("\tld.shared.b8")]
    assert told.endswith("\tsub.u32 \t%place, %place, 8;\n\tadd.s32 \t%r4, %r5, %place;\n")


def test_each_consumer_meets_at_a_barrier_of_its_own():
    text = merged(ptx())
    assert "\tshr.u32 \t%meeting, %r3, 2;\n" in text
    assert MEETING not in text and text.count("\tbar.sync \t%meeting, 128;\n") == 2
    assert "bar.sync %r9, 416" in text, "what a template writes stays"


def test_only_meetings_before_a_wait_that_says_so_are_taken_out():
    met = "\tbar.sync \t%meeting, 128;\n"
    text = merged(ptx())
    assert f"8;\n{WAIT}{met}{WAIT}" in text
    assert f"8;\n{met}{WAIT}" in merged(ptx().replace(ALONE, "another comment"))


def test_what_says_nothing_of_consumers_stays_as_it_is():
    alone = ptx().replace(announcement(3, 160), "one consumer")
    assert merged(alone) == alone and block_warps(alone) is None


@pytest.mark.parametrize(
    "line",
    [
        ".reqntid 256\n",
        "\tshfl.sync.idx.b32 \t%r3, %r2, 0, 31, -1;\n",
        "\tadd.s32 \t%r4, %r5, %r3;\n",
        "\tbarrier.sync \t1;\n\tsetmaxnreg.inc.sync.aligned.u32 \t256;\n\tbarrier.sync \t1;\n",
        MEETING,
    ],
)
def test_what_is_not_as_it_was_is_refused(line):
    """Half of a change would be a block that waits forever."""
    assert line in ptx()
    with pytest.raises(RenderError, match=r"found 0 times|number of a thread once"):
        merged(ptx().replace(line, ""))


def test_what_is_written_otherwise_has_another_number():
    """Triton 3.6 keeps kernels by their source, in which FORM is all that tells of this."""
    written = {2: "af8e28d0db46728e"}
    assert hashlib.sha256(merged(ptx()).encode()).hexdigest()[:16] == written[FORM]


def test_a_second_start_is_refused():
    start = ptx().index("\tmov.u32 \t%r1")
    begin = ptx()[start : ptx().index("\t@%p1")]
    with pytest.raises(RenderError, match="reads the number of a thread once"):
        merged(ptx().replace(begin, begin + begin))


@pytest.mark.parametrize("parts", PARTS)
def test_threads_have_the_numbers_that_their_code_was_compiled_for(parts):
    """A mask of every fourth key was refused: its code takes two low bits of a row less a number
    that three consumers' threads have in common in its low bits alone."""
    consume, load = (
        "\tand.b32 \t%r1, %r1, 127;\n\tand.b32 \t%r2, %r2, 3;\n",
        "\tsub.s32 \t%r1, %r1, 256;\n\tsub.s32 \t%r2, %r2, 8;\n",
    )
    text = merged(ptx(parts=parts))
    assert f"$L__BB0_1:\n{load}" in text
    if parts == "3.6":
        assert f"$L__BB0_2:\n{consume}" in text
    else:
        assert f"bra \t$L__BB0_1;\n{consume}" in text


@pytest.mark.parametrize("parts", PARTS)
def test_what_is_made_of_a_number_before_the_warps_part_is_made_again_behind(parts):
    """Of D 256 with documents the compiler takes a thread's lane before: it was refused."""
    line = "\tand.b32 \t%r30, %r1, 31;\n"
    text = merged(ptx(parts=parts).replace(PARTS[parts], line + PARTS[parts], 1))
    assert f"\tand.b32 \t%r2, %r2, 3;\n{line}" in text
    assert f"\tsub.s32 \t%r2, %r2, 8;\n{line}" in text


def test_the_stages_stand_behind_the_hook_there_was(monkeypatch):
    seen = []

    def before(*given):
        seen.append(given)
        return ("key", "hash") if not given else None

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", before)
    stages = {"llir": None, "ptx": lambda source, metadata: source}
    metadata = {"num_warps": 8}
    with compiled_by(MERGE):
        hook = knobs.runtime.add_stages_inspection_hook
        hook("backend", stages, "options", "language", 90)
        words = hook()
    assert stages["ptx"](ptx(), metadata) == merged(ptx())
    assert metadata == {"num_warps": 16}
    assert stages["ptx"]("another kernel", metadata) == "another kernel"
    assert len(seen) == 2
    assert [word.split()[0] for word in words] == ["key", "hash"] and NAME in words[0]


def test_triton_is_told_when_a_pass_has_another_text(monkeypatch):
    """It found kernels in its cache that an older text of the pass had made."""
    told = []
    for text in ("one text", "another"):
        monkeypatch.setattr(compiling, "inspect", SimpleNamespace(getsource=lambda _, x=text: x))
        with compiled_by(MERGE):
            told.append(knobs.runtime.add_stages_inspection_hook())
    assert all(one != other for one, other in zip(*told, strict=True))


def test_the_hook_is_there_while_someone_compiles_and_then_as_before(monkeypatch):
    def before(*given):
        return None

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", before)
    entered, leave = threading.Event(), threading.Event()

    def compiles():
        with compiled_by(MERGE):
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=compiles)
    other.start()
    assert entered.wait(10)
    ours = knobs.runtime.add_stages_inspection_hook
    with compiled_by(MERGE):
        # One hook for both: of two, the last to leave would leave the first.
        assert knobs.runtime.add_stages_inspection_hook is ours is not before
    leave.set()
    other.join(10)
    assert knobs.runtime.add_stages_inspection_hook is before
    with compiled_by(Stages()):
        assert knobs.runtime.add_stages_inspection_hook is before


def test_a_compile_of_another_thread_is_left_as_it_is(monkeypatch):
    """The hook is one of the process: torch's own kernels may be compiled meanwhile."""
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    made, found = [], []

    def elsewhere():
        hook = knobs.runtime.add_stages_inspection_hook
        stages = {"ptx": made.append, "cubin": made.append}
        hook("backend", stages, "options", "language", 90)
        found.append((stages, hook()))

    with compiled_by(Stages((PASS,), "ptxas")):
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join(10)
    assert found == [({"ptx": made.append, "cubin": made.append}, ("", ""))]
