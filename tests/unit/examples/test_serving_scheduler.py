"""The example server's scheduler: who is admitted, what a step holds, who leaves and how."""

import time
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from examples.serving.request import End, Limits, Refused, Request, Token
from examples.serving.scheduler import END_OF_TEXT, Scheduler

LIMITS = Limits(batch=3, chunk=6, longest=40, page=4, pages=17, queue=4)


class Some:
    """Requests of a scheduler, and steps whose tokens follow from nothing but their place."""

    def __init__(self, limits=LIMITS, **more):
        self.scheduler = Scheduler(limits, **more)
        self.told = {}

    def submit(self, id, prompt, max_tokens=3, **more):
        events = self.told[id] = []
        tokens = prompt if isinstance(prompt, list) else [1 + i for i in range(prompt)]
        request = Request(id, list(tokens), max_tokens, events.append, **more)
        try:
            self.scheduler.submit(request)
        except Refused:
            del self.told[id]
            raise
        return request

    def step(self, token=7):
        step = self.scheduler.schedule()[0]
        if step is not None:
            given = [Token(token, -1.0) if p.wanted else None for p in step.pieces]
            self.scheduler.took(step, given)
        return step

    def drain(self):
        while self.step() is not None:
            pass

    def end(self, id):
        return self.told[id][-1].reason


def spans(step):
    return {p.request.id: (p.first, p.last) for p in step.pieces}


def test_prompts_share_what_decoding_requests_leave():
    some = Some()
    some.submit("a", [1, 2, 3])
    assert spans(some.step()) == {"a": (0, 3)}
    some.submit("b", [9] * 5)
    some.submit("c", [8] * 9)
    # 6 rows beside one for each: a decodes, b has its whole prompt, c what is left.
    assert spans(some.step()) == {"a": (3, 4), "b": (0, 5), "c": (0, 3)}
    assert spans(some.step()) == {"a": (4, 5), "b": (5, 6), "c": (3, 9)}
    some.drain()
    assert {id: some.end(id) for id in "abc"} == dict.fromkeys("abc", "length")
    assert all(len(events) == 4 for events in some.told.values())


def test_a_request_is_admitted_with_all_of_its_pages_and_none_overtakes():
    some = Some()
    big, small = some.submit("big", 30, 10), some.submit("small", 20, 10)
    tiny = some.submit("tiny", [50], 1)
    some.step()
    # 10 of 16 pages; the second would take 8, and the third waits behind it.
    assert len(big.pages) == 10 and big.slot >= 0 and small.slot < 0 and tiny.slot < 0
    assert some.scheduler.cancel("big") and not some.scheduler.cancel("big")
    some.step()
    assert some.end("big") == "cancelled" and small.slot >= 0 and tiny.pages
    some.drain()
    assert some.scheduler.pages.available == 16


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "kind", "words"),
    [
        ([], 1, "invalid", "the prompt is empty"),
        (38, 3, "too_long", "make 41, and a request has at most 40: shorten"),
    ],
)
def test_what_can_never_run_is_refused(prompt, max_tokens, kind, words):
    with pytest.raises(Refused, match=words) as refused:
        Some().submit("a", prompt, max_tokens)
    assert refused.value.kind == kind


def test_a_cache_smaller_than_a_request_is_the_limit():
    with pytest.raises(Refused, match="at most 16"):
        Some(Limits(batch=1, chunk=4, longest=99, page=4, pages=5)).submit("a", 12, 5)


def test_a_full_queue_refuses_and_an_id_is_served_once():
    some = Some()
    for i in range(4):
        some.submit(str(i), 3)
    with pytest.raises(Refused, match="4 requests are waiting") as refused:
        some.submit("more", 3)
    assert refused.value.kind == "busy"
    some.step()
    with pytest.raises(Refused, match="the id '0'"):
        some.submit("0", 3)
    some.drain()
    some.submit("0", 3)


def test_a_prefix_is_found_and_the_last_token_is_computed_all_the_same():
    some = Some()
    some.submit("a", list(range(1, 13)), 2)
    some.drain()
    twin = some.submit("b", list(range(1, 13)), 2)
    longer = some.submit("c", [*range(1, 13), 99, 98], 2)
    other = some.submit("d", list(range(1, 13)), 2, salt=b"another owner")
    assert spans(some.step()) == {"b": (8, 12), "c": (12, 14), "d": (0, 3)}
    assert (twin.cached, longer.cached, other.cached) == (8, 12, 0)
    assert twin.pages[:2] == longer.pages[:2] and not set(other.pages) & set(longer.pages)
    some.drain()
    # An answer's own pages are found too, as the next turn of a conversation asks for them.
    again = some.submit("e", [*range(1, 13), 7, 7, 7, 7, 7], 2)
    some.step()
    assert again.cached == 12


def test_a_step_has_a_cascade_where_it_saves_enough():
    begin = list(range(1, 13))
    for least, expected in ((1, 2), (13, 0), (0, 0)):
        some = Some(cascade_from=least)
        some.submit("first", begin, 1)
        some.drain()
        for i in range(2):
            some.submit(str(i), [*begin, 30 + i, 40], 3)
        assert some.step().shared is None  # two rows each: still in the prompt
        shared = some.step().shared
        assert (0 if shared is None else len(shared.members)) == expected
        if shared is not None:
            assert len(shared.pages) == 3


def test_time_is_over_for_those_who_wait_and_those_who_run():
    some = Some()
    some.submit("running", 30, 9, deadline=time.monotonic() + 0.02)
    some.submit("waiting", 30, 9, deadline=time.monotonic() + 0.02)
    some.step()
    time.sleep(0.03)
    assert some.step() is None
    assert some.end("running") == some.end("waiting") == "timeout"
    assert some.scheduler.pages.available == 16


def test_an_answer_ends_with_the_token_that_ends_texts():
    some = Some()
    some.submit("a", 3, 9)
    some.step()
    some.step(END_OF_TEXT)
    assert some.end("a") == "stop" and some.step() is None


def test_a_request_that_ends_during_its_step_gets_no_more_of_it():
    some = Some()
    request = some.submit("a", 3, 9)
    step = some.scheduler.schedule()[0]
    some.scheduler.cancel("a")
    assert request.pages and some.scheduler.pages.used  # the step still writes to them
    assert some.scheduler.took(step, [Token(7, -1.0)]) == [request]
    assert some.told["a"] == [End("cancelled")] and not some.scheduler.pages.used


def test_a_step_that_failed_ends_all():
    some = Some()
    for i in range(4):
        some.submit(str(i), 20, 9)
    some.step()
    assert len(some.scheduler.fail()) == 4
    assert {some.end(str(i)) for i in range(4)} == {"failed"}
    assert some.scheduler.pages.available == 16


STORY = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("step"), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("late"), st.integers(1, 30), st.integers(1, 9)),
    ),
    max_size=50,
)


@settings(max_examples=150, deadline=None)
@given(STORY)
def test_no_page_is_lost_or_doubly_given_whatever_happens(story):
    """Tokens are small, so that prompts begin alike; every request ends once."""
    some, limits = Some(cascade_from=4), LIMITS
    for n, (what, one, other) in enumerate(story):
        if what == "cancel":
            some.scheduler.cancel(str(one))
        elif what == "step":
            step = some.step(token=one)
            assert step is None or len({p.request.slot for p in step.pieces}) <= limits.batch
        else:
            deadline = time.monotonic() - 1 if what == "late" else float("inf")
            prompt = [1 + i % 3 for i in range(one)]
            try:
                some.submit(str(n), prompt, other, deadline=deadline)
            except Refused as refused:
                assert refused.kind in ("too_long", "busy")
        running = some.scheduler.running
        own = [p for r in running for p in r.pages[r.cached // limits.page :]]
        assert len(own) == len(set(own)), "a page that was taken is one request's"
        held = Counter(p for r in running for p in r.pages)
        assert +some.scheduler.pages._holders == held
    some.drain()
    assert some.scheduler.pages.available == 16 and not some.scheduler._known
    for events in some.told.values():
        assert [isinstance(e, End) for e in events] == [False] * (len(events) - 1) + [True]
