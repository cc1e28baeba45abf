"""A kernel is called by its template: profilers list kernels by that name."""

import re

import pytest

from flexattn.kernels.base.environment import templates_folder
from flexattn.kernels.base.source import entry_of

TEMPLATES = sorted(
    path.relative_to(templates_folder()).as_posix()
    for path in templates_folder().rglob("*.py.jinja")
    if path.parent.name != "nki"
)


def test_no_two_templates_share_a_name():
    assert len({entry_of(each) for each in TEMPLATES}) == len(TEMPLATES)
    assert entry_of("hopper/prefill.py.jinja") == "flexattn_hopper_prefill"
    assert entry_of("triton_backward/backward.py.jinja") == "flexattn_triton_backward"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_defines_it_once(template):
    text = (templates_folder() / template).read_text()
    assert len(re.findall(r"^def {{ entry }}\(", text, re.MULTILINE)) == 1
