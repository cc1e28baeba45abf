"""The rows of the bench that stores keys, and their bytes."""

from bench.append import append_rows, copy_of

ROWS = {row.name: row for row in append_rows()}


def test_rows_are_unique_and_have_their_bytes():
    assert len(ROWS) == len(append_rows())
    numbers = 2 * 64 * 8 * 128
    assert ROWS["decode-64-bf16"].bytes_moved == 4 * numbers
    assert ROWS["decode-64-e4m3"].bytes_moved == 3 * numbers
    assert ROWS["decode-64-e4m3-token-head"].bytes_moved == 3 * numbers + 2 * 64 * 8 * 4


def test_the_copy_moves_as_many_bytes():
    row = ROWS["decode-64-e4m3-token-head"]
    assert copy_of(row, "cpu")().numel() * 2 == row.bytes_moved
