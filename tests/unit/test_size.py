"""What the tracked tree may weigh, and of it what no person writes: measurements and pictures."""

import subprocess

import pytest

from tests.processes import ROOT

# In KiB. What a part holds more of is a decision: its writers say once what repeats.
LIMITS = {
    "": 8660,
    "configs/nvidia-h200": 560,
    "configs/studies": 160,
    "bench/results": 520,
    "notebooks": 260,
    "tests/golden/files": 310,
    "docs/pictures": 80,
}


def tracked(folder):
    """The files below a folder that git keeps; none away from a checkout, as in an sdist."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", f"./{folder}"], cwd=ROOT, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


@pytest.mark.parametrize("folder", LIMITS)
def test_a_part_of_the_tree_stays_within_its_limit(folder):
    # A file that is moved while it is tracked is not there.
    size = sum(path.stat().st_size for path in tracked(folder) if path.is_file())
    assert size <= LIMITS[folder] * 1024, f"{folder or 'the tree'}: {size / 1024:.0f} KiB"
