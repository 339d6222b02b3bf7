"""Chapter 14's measures: an interval, where a loop begins, and the model of the speed-up."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapters.mtp import break_even, loop_start, speedup, wilson

quick = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("hits, n, low, high", [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0),
                                                (50, 100, 0.4038, 0.5962), (0, 0, 0.0, 1.0)])
def test_wilson_against_published_values(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=1e-4)


@quick
@given(st.integers(1, 500), st.floats(0, 1))
def test_wilson_holds_the_rate_and_solves_its_equation(n, share):
    """Its ends are the rates p with |p - hits/n| = z · sqrt(p (1 - p) / n)."""
    hits = round(share * n)
    low, high = wilson(hits, n)
    assert 0 <= low + 1e-12 and low - 1e-12 <= hits / n <= high + 1e-12 and high <= 1 + 1e-12
    for p in (low, high):
        assert (p - hits / n) ** 2 == pytest.approx(1.96 ** 2 * p * (1 - p) / n, abs=1e-9)


@pytest.mark.parametrize("ids, start", [([1, 2, 3, 4, 5], 5), ([1, 2, 7, 7, 7], 2), ([1, 2, 7, 7], 4),
                                        ([9, 1, 2, 1, 2, 1, 2], 1), ([9, 1, 2, 1, 2, 1], 6), ([5, 5, 5], 0), ([], 0),
                                        ([5, 5, 5, 1], 4)])
def test_loop_start(ids, start):
    """A tail of at least three equal pieces is a loop; a repetition that ends is none."""
    assert loop_start(ids) == start


@quick
@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(3, 6))
def test_a_loop_begins_no_later_than_it_was_made_to(head, piece, times):
    ids = head + piece * times
    start = loop_start(ids)
    assert start <= len(head)
    tail = ids[start:]
    assert any(tail[p:] == tail[:-p] and len(tail) >= 3 * p for p in range(1, 17))


@quick
@given(st.floats(0.5, 3), st.floats(0, 1), st.floats(0.1, 3))
def test_break_even_is_where_the_speedup_is_one(verify, draft, redo):
    a = break_even(verify, draft, redo)
    assert speedup(a, verify, draft, redo) == pytest.approx(1)
    assert speedup(a + 0.1, verify, draft, redo) > 1


def test_speedup_by_hand():
    """Two tokens for one verify and one draft; or one token for verify, draft and a second forward."""
    assert speedup(1.0, 1.1, 0.2) == pytest.approx(2 / 1.3)
    assert speedup(0.0, 1.1, 0.2) == pytest.approx(1 / 2.3)
