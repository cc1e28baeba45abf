"""A launch that gave up waiting is told by the next run."""

import pytest

from flexattn.errors import StalledError
from flexattn.serving.launching import GivenUp


def test_the_word_that_a_kernel_wrote_is_an_error_from_then_on():
    given_up = GivenUp()
    given_up.check()
    given_up.word[0] = 1  # as a kernel writes it: into memory, past any object of Python's
    for _ in range(2):
        with pytest.raises(StalledError, match=r"(?s)waited in vain.*make a new plan"):
            given_up.check()
