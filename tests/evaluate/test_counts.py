import pytest

from peagle.evaluate.counts import Counts, context_bucket, pool


def test_E01_the_pooled_figure_weighs_passes_and_not_requests():
    # calls / accepted tokens; two requests each
    a = [Counts(100, (50,), 150), Counts(5, (15,), 20)]  # 150/100 and 20/5 = accepted + calls over calls
    b = [Counts(90, (60,), 150), Counts(8, (12,), 20)]
    pooled_a, pooled_b = pool(a, 1), pool(b, 1)
    assert pooled_a.acceptance_length == pytest.approx(170 / 105, abs=5e-4)
    assert pooled_a.acceptance_length == pytest.approx(1.619, abs=5e-4)
    assert pooled_b.acceptance_length == pytest.approx(1.735, abs=5e-4)
    means = [sum(c.acceptance_length for c in counts) / 2 for counts in (a, b)]
    assert means == pytest.approx([2.750, 2.083], abs=5e-4)
    assert pooled_a.acceptance_length < pooled_b.acceptance_length
    assert means[0] > means[1]


def test_E03_nothing_drafted_gives_absent_figures_and_no_exception():
    for counts in (Counts(0, (0, 0, 0), 0), pool([], 3), Counts.of_passes([], 3, 0)):
        assert counts.acceptance_length is None
        assert counts.acceptance_per_position is None
        assert counts.conditional_per_position is None
        assert counts.accepted_per_pass is None
        assert counts.histogram == (0, 0, 0, 0)


def test_E05_unconditional_and_conditional_rates_are_both_given():
    counts = Counts(100, (70, 42, 21), 233)
    assert counts.acceptance_per_position == pytest.approx((0.70, 0.42, 0.21))
    assert counts.conditional_per_position == pytest.approx((0.70, 0.60, 0.50))
    assert counts.acceptance_length == pytest.approx(2.33)
    one, two, three = counts.conditional_per_position
    assert 1 + one + one * two + one * two * three == pytest.approx(2.33)


def test_E06_the_verifiers_own_token_is_counted_in_the_length_only():
    rejected = Counts.of_passes([[0, 0]], 3, 2)
    assert (rejected.acceptance_length, rejected.accepted_per_pass) == (1.0, 0.0)
    accepted = Counts.of_passes([[3, 3]], 3, 8)
    assert (accepted.acceptance_length, accepted.accepted_per_pass) == (4.0, 3.0)


def test_E07_all_rounds_of_all_chats_count():
    counts = Counts.of_passes([[4, 1], [1]], 4, 9)
    assert counts.accepted_per_pass == 2.0
    assert counts.accepted_per_position == (3, 1, 1, 1)
    assert counts.histogram == (0, 2, 0, 0, 1)


def test_a_position_never_reached_has_no_conditional_rate():
    assert Counts(4, (2, 0, 0), 0).conditional_per_position == (0.5, 0.0, None)


def test_different_numbers_of_drafted_tokens_are_never_pooled():
    with pytest.raises(ValueError, match="pooled"):
        pool([Counts(1, (1,), 1), Counts(1, (1, 1), 1)], 1)


def test_context_buckets_double_and_have_no_gap():
    names = [context_bucket(n) for n in (1, 128, 129, 256, 257, 2000)]
    assert names == ["1-128", "1-128", "129-256", "129-256", "257-512", "1025-2048"]
