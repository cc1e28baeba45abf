"""The check of plain English finds the habits, and leaves plain sentences alone."""

import pytest

from tests.plain import finds, mean_words


@pytest.mark.parametrize(
    "text",
    [
        "All bits are equal but for the last one.",
        "A fault is said once.",
        "It ends. Of the two the better one stays.",
        "Only a GPU that is here can be timed.",
    ],
)
def test_habits_are_found(text):
    assert list(finds(text))


def test_a_habit_is_found_across_lines_and_its_line_is_named():
    text = "# A page\n\nGradients of tensors,\nbut\nof those that are read. It ends.\n"
    assert [(line, words) for line, words, _ in finds(text)] == [(3, "but of")]


def test_plain_sentences_are_left_alone():
    text = (
        "All bits are equal except the last one. It prints a fault once. The gate judges slices."
    )
    assert not list(finds(text))


def test_tables_code_and_addresses_are_no_words():
    code = "```sh\na b c d e\n```\n"
    page = f"# A page\n\nTwo [words](a/b c).\n\n| a b c d e |\n\n{code}Three short words.\n"
    assert mean_words(page) == 2.5
