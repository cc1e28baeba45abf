"""A process that compiled a kernel ends without a word about it."""

from tests.processes import python


def test_a_command_that_compiled_reports_no_leaks(tmp_path):
    """Triton 3.9 ended every compile for Hopper with pages of "nanobind: leaked"."""
    places = {"FLEXATTN_CACHE_DIR": tmp_path, "TRITON_CACHE_DIR": tmp_path / "triton"}
    command = "render noop --option BACKEND=GLUON --head-dim 64 --show resources".split()
    out, err = python("-m", "flexattn", *command, **places)
    assert "registers=" in out and "nanobind" not in err
