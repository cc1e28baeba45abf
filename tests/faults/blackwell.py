"""Faults of Blackwell's prefill, which is run in plain Python: waits, commits, stages, softmax."""

from tests.faults.fault import Fault

PREFILL = "templates/blackwell/prefill.py.jinja"
MULTIPLY = "templates/blackwell/multiply.jinja"
SOFTMAX = "templates/blackwell/softmax.jinja"
CORRECT = "templates/blackwell/correct.jinja"
FILE = "tests/unit/kernels/blackwell/test_blackwell.py"
NUMBERS = FILE + "::test_numbers"
FULL = NUMBERS + "[two-full-dims0]"
CAUSAL = NUMBERS + "[two-causal-dims1]"
REQUESTS = "templates/base/requests.jinja"
WORK_TILE = "templates/blackwell/work_tile.jinja"
PAGES = "tests/unit/kernels/blackwell/test_pages.py::test_pages"
ASKED = "tests/unit/kernels/blackwell/test_pages.py::test_what_a_plan_asks"


def _removed(name: str, file: str, line: str, test: str = FULL) -> Fault:
    return Fault(f"Blackwell: {name}", file, line, "pass", test)


BLACKWELL = (
    _removed(
        "products do not wait for K",
        MULTIPLY,
        "mbarrier.wait(barriers.index(K_FULL + stage), phase)",
    ),
    _removed(
        "products do not wait for V",
        MULTIPLY,
        "mbarrier.wait(barriers.index(V_FULL + v_stage), v_phase)",
    ),
    _removed(
        "products do not wait for Q",
        MULTIPLY,
        "mbarrier.wait(barriers.index(Q_FULL + q_tile), 0)",
    ),
    _removed(
        "P V does not wait for P",
        MULTIPLY,
        "mbarrier.wait(barriers.index(P_FULL + q_tile), i & 1)",
    ),
    _removed(
        "P V does not wait for the correction",
        MULTIPLY,
        "mbarrier.wait(barriers.index(O_EMPTY + q_tile), i & 1)",
    ),
    _removed(
        "K is never released",
        MULTIPLY,
        "tcgen05_commit(barriers.index(K_EMPTY + stage))",
    ),
    _removed(
        "V is never released",
        MULTIPLY,
        "tcgen05_commit(barriers.index(V_EMPTY + v_stage))",
    ),
    Fault(
        "Blackwell: V is released before its products",
        MULTIPLY,
        "        for q_tile in gl.static_range(Q_TILES):\n            # P is written",
        "        mbarrier.arrive(barriers.index(V_EMPTY + v_stage), count=1)\n"
        "        for q_tile in gl.static_range(Q_TILES):\n            # P is written",
        FULL,
    ),
    Fault(
        "Blackwell: the first P V is added to what lies there",
        MULTIPLY,
        "use_acc=i > 0",
        "use_acc=True",
        FULL,
    ),
    Fault(
        "Blackwell: scores are told complete by their first product",
        MULTIPLY,
        "if loop.last else",
        "if loop.first else",
        NUMBERS + "[192-causal-dims12]",
    ),
    _removed(
        "K overwrites what is being multiplied",
        PREFILL,
        "mbarrier.wait(barriers.index(K_EMPTY + stage), phase)",
    ),
    _removed(
        "V overwrites what is being multiplied",
        PREFILL,
        "mbarrier.wait(barriers.index(V_EMPTY + stage), phase)",
    ),
    Fault(
        "Blackwell: the phase of a ring does not turn",
        PREFILL,
        "gl.where(last, phase ^ 1, phase)",
        "phase",
        FULL,
    ),
    _removed(
        "the softmax does not wait for scores",
        SOFTMAX,
        "mbarrier.wait(barriers.index(S_FULL + q_tile), i & 1)",
    ),
    Fault(
        "Blackwell: P is told complete before it is stored",
        SOFTMAX,
        "    m_i, m_safe, alpha = new_maximum(",
        "    mbarrier.arrive(barriers.index(P_FULL + q_tile), count=1)\n"
        "    m_i, m_safe, alpha = new_maximum(",
        FULL,
    ),
    Fault(
        "Blackwell: sums are not rescaled",
        SOFTMAX,
        "m_safe, l_i * alpha, 0)",
        "m_safe, l_i, 0)",
        FULL,
    ),
    Fault(
        "Blackwell: keys of another tile of rows' run",
        SOFTMAX,
        "(end - 1 - i < run_begin) |",
        "(end - 1 - i < begin) |",
        FILE + "::test_blocks_that_are_not_listed",
    ),
    Fault(
        "Blackwell: a polynomial of the wrong order",
        SOFTMAX,
        'join(" + r * (")',
        'reverse | join(" + r * (")',
        NUMBERS + "[polynomial-causal-dims9]",
    ),
    Fault(
        "Blackwell: a causal mask keeps a key more",
        PREFILL,
        "(1 << kept) - 1",
        "(2 << kept) - 1",
        CAUSAL,
    ),
    _removed(
        "O is rescaled by the factors of the tile before",
        CORRECT,
        "mbarrier.wait(barriers.index(ALPHA_FULL + q_tile), i - 1 & 1)",
    ),
    Fault(
        "Blackwell: the output waits for the first P V alone",
        MULTIPLY,
        "mbarrier_preds=[i + 1 == num_n_blocks]",
        "mbarrier_preds=[i == 0]",
        FULL,
    ),
    _removed(
        "the output does not wait for the last P V",
        CORRECT,
        "mbarrier.wait(barriers.index(O_FULL + q_tile), 0)",
    ),
    _removed(
        "the output does not wait for the sums",
        CORRECT,
        "mbarrier.wait(barriers.index(SUMS_FULL + q_tile), 0)",
        NUMBERS + "[one-lists-dims7]",
    ),
    Fault(
        "Blackwell: O is rescaled only if a maximum rose by much",
        CORRECT,
        "if gl.min(alpha, 0) < 1.0:",
        "if gl.min(alpha, 0) < 0.0001:",
        FULL,
    ),
    _removed(
        "V behind a request's last key is not cleared",
        CORRECT,
        "clear_tail(v_tiles, barriers, 0, 0, kv_len - (end - 1) * BLOCK_N)",
        PAGES + "[16]",
    ),
    _removed(
        "V is cleared before it has come",
        REQUESTS,
        "mbarrier.wait({{ full }}, phase)",
        PAGES + "[16]",
    ),
    Fault(
        "Blackwell: the first page of a tile alone",
        REQUESTS,
        "{{ start }} // PAGE + part",
        "{{ start }} // PAGE",
        PAGES + "[16]",
    ),
    Fault(
        "Blackwell: a tile of keys within a page is read from its first key",
        REQUESTS,
        "{{ start }} % PAGE, {{ column }}",
        "0, {{ column }}",
        PAGES + "[256]",
    ),
    Fault(
        "Blackwell: rows behind a request's last are stored",
        CORRECT,
        "if rows_left >= TOKENS:",
        "if rows_left >= 1:",
        PAGES + "[32]",
    ),
    Fault(
        "Blackwell: all tiles of rows store to the rows of the first",
        CORRECT,
        "out_row += TOKENS",
        "out_row += 0",
        PAGES + "[64]",
    ),
    Fault(
        "Blackwell: a program without a work tile stores the last one's rows",
        WORK_TILE,
        "rows_left = gl.where(gl.program_id(0) < num_work_tiles, rows_left, 0)",
        "pass",
        PAGES + "[32]",
    ),
    Fault(
        "Blackwell: positions of the second tile count rows of all heads",
        SOFTMAX,
        "row_start = tile_start + q_tile * TOKENS",
        "row_start = tile_start + q_tile * ROWS",
        ASKED + "[some of five heads]",
    ),
)
