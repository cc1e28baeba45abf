"""Records of many machines in one cache: the better one of each key."""

from dataclasses import replace

import pytest

from flexattn.records.store import Store, better, merge
from tests.records import HERE, decode_record, prefill_record

RECORD = prefill_record(provenance="measured")


def path_of(store):
    return store.path(HERE, RECORD.key)


def other(**changes):
    """A record of the same key whose winner is the default."""
    decision = replace(RECORD.decision, winner=RECORD.decision.default)
    return replace(RECORD, decision=decision, **changes)


def test_merging_keeps_the_better_record_and_lists_conflicts(tmp_path):
    one, two, into = (Store(tmp_path / name) for name in ("one", "two", "into"))
    short = other(made="2026-11-22")
    short = replace(short, trials=tuple(replace(t, finals=t.finals[:3]) for t in short.trials))
    one.write(RECORD)
    two.write(short)
    two.write(decode_record(provenance="measured"))
    broken = path_of(two).parent / "b1-q1-k1.json"
    broken.write_text("{}")
    for sources in ([one.root, two.root], [two.root, one.root]):
        done = merge(sources, into.root / sources[0].name)
        kept = Store(into.root / sources[0].name)
        assert kept.read(HERE, RECORD.key) == RECORD and len(list(kept.entries())) == 2
        (conflict,) = done.conflicts
        assert (conflict.kept, conflict.dropped) == (RECORD, short)
        assert (conflict.kept_from, conflict.dropped_from) == (path_of(one), path_of(two))
        assert "over" in str(conflict) and [path for path, _ in done.refused] == [broken]
    again = merge([one.root, two.root], into.root / "one")
    assert (again.written, again.kept) == (0, 3)


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        ({"provenance": "measured"}, {"provenance": "untuned", "made": "2027-01-01"}),
        ({"made": "2026-11-22"}, {"made": "2026-11-21"}),
    ],
)
def test_what_better_means(winner, loser):
    new, old = replace(RECORD, **winner), replace(RECORD, **loser)
    assert better(new, old) and not better(old, new) and not better(new, new)
