"""What a peer's refusal says of what it raised."""

import pytest

from bench.peers import Refusal


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("", "ValueError: "),
        ("no kernel\nfor that", "ValueError: no kernel"),
        ("at /opt/a-b/c.d/decode.cu:63: group 5", "ValueError: at decode.cu:63: group 5"),
        ("16/8 heads, tokens/s", "ValueError: 16/8 heads, tokens/s"),
    ],
)
def test_the_first_line_with_files_by_name(said, kept):
    assert Refusal.of(ValueError(said)).reason == kept
