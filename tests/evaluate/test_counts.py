import json
import random

import pytest

from peagle.evaluate.counts import (
    DatasetCounts,
    PassCost,
    PassCounts,
    best,
    card_section,
    context_bucket,
    expected_speedups,
    figures,
    implausible,
    pool,
    report,
    table,
)

A, B = PassCounts(100, (70, 42, 21), 250), PassCounts(10, (1, 0, 0), 12)

# design.md section 7: the published rows, in %, and their Average
PUBLISHED = {
    "HumanEval": ((81.3, 59.0, 41.1, 27.9, 18.8, 12.8, 8.9), 3.500),
    "math_reasoning": ((83.3, 63.5, 47.0, 34.3, 24.4, 17.2, 11.8), 3.820),
    "qa": ((70.5, 44.7, 27.6, 17.1, 10.8, 7.1, 4.8), 2.830),
    "question": ((74.6, 49.6, 31.6, 20.2, 13.1, 8.5, 5.6), 3.030),
    "rag": ((73.6, 48.4, 29.8, 18.4, 11.3, 6.9, 4.1), 2.930),
    "summarization": ((68.0, 39.0, 21.0, 10.8, 5.4, 2.6, 1.2), 2.480),
    "tool_call": ((73.7, 47.6, 28.7, 17.1, 10.3, 6.2, 3.7), 2.870),
    "translation": ((73.8, 47.7, 28.7, 17.3, 10.4, 6.5, 4.1), 2.890),
    "writing": ((75.0, 50.0, 32.1, 20.6, 13.3, 8.7, 5.7), 3.050),
}


def test_E01_the_pooled_figure_weighs_passes_and_not_requests():
    # calls / accepted tokens; two requests each
    a = [PassCounts(100, (50,), 150), PassCounts(5, (15,), 20)]  # 150/100 and 20/5 = accepted + calls over calls
    b = [PassCounts(90, (60,), 150), PassCounts(8, (12,), 20)]
    pooled_a, pooled_b = pool(a, 1), pool(b, 1)
    assert pooled_a.acceptance_length == pytest.approx(170 / 105, abs=5e-4)
    assert pooled_a.acceptance_length == pytest.approx(1.619, abs=5e-4)
    assert pooled_b.acceptance_length == pytest.approx(1.735, abs=5e-4)
    means = [sum(c.acceptance_length for c in counts) / 2 for counts in (a, b)]
    assert means == pytest.approx([2.750, 2.083], abs=5e-4)
    assert pooled_a.acceptance_length < pooled_b.acceptance_length
    assert means[0] > means[1]


def test_E03_nothing_drafted_gives_absent_figures_and_no_exception():
    for counts in (PassCounts(0, (0, 0, 0), 0), pool([], 3), PassCounts.of_passes([], 3, 0)):
        assert counts.acceptance_length is None
        assert counts.acceptance_per_position is None
        assert counts.conditional_per_position is None
        assert counts.accepted_per_pass is None
        assert counts.histogram == (0, 0, 0, 0)


def test_E05_unconditional_and_conditional_rates_are_both_given():
    counts = PassCounts(100, (70, 42, 21), 233)
    assert counts.acceptance_per_position == pytest.approx((0.70, 0.42, 0.21))
    assert counts.conditional_per_position == pytest.approx((0.70, 0.60, 0.50))
    assert counts.acceptance_length == pytest.approx(2.33)
    one, two, three = counts.conditional_per_position
    assert 1 + one + one * two + one * two * three == pytest.approx(2.33)


def test_E06_the_verifiers_own_token_is_counted_in_the_length_only():
    rejected = PassCounts.of_passes([0, 0], 3, 2)
    assert (rejected.acceptance_length, rejected.accepted_per_pass) == (1.0, 0.0)
    accepted = PassCounts.of_passes([3, 3], 3, 8)
    assert (accepted.acceptance_length, accepted.accepted_per_pass) == (4.0, 3.0)


def test_E07_all_rounds_of_all_chats_count():
    counts = PassCounts.of_passes([4, 1, 1], 4, 9)
    assert counts.accepted_per_pass == 2.0
    assert counts.accepted_per_position == (3, 1, 1, 1)
    assert counts.histogram == (0, 2, 0, 0, 1)


def test_a_position_never_reached_has_no_conditional_rate():
    assert PassCounts(4, (2, 0, 0), 0).conditional_per_position == (0.5, 0.0, None)


def test_different_numbers_of_drafted_tokens_are_never_pooled():
    with pytest.raises(ValueError, match="pooled"):
        pool([PassCounts(1, (1,), 1), PassCounts(1, (1, 1), 1)], 1)


def test_context_buckets_double_and_have_no_gap():
    names = [context_bucket(n) for n in (1, 128, 129, 256, 257, 2000)]
    assert names == ["1-128", "1-128", "129-256", "129-256", "257-512", "1025-2048"]


def made(**datasets: PassCounts) -> dict:
    """As evaluation.json has it: valid JSON, without NaN."""
    found = report({name: DatasetCounts(counts, {}) for name, counts in datasets.items()})
    return json.loads(json.dumps(found, allow_nan=False))


def test_average_is_the_plain_mean_of_the_rows_and_pooled_sums_passes():
    found = made(a=A, b=B)
    assert [line[0] for line in table(found)] == ["dataset", "a", "b", "Average", "Pooled"]
    assert found["average"]["acceptance_length"] == pytest.approx((2.33 + 1.1) / 2)
    assert found["average"]["acceptance_per_position"] == pytest.approx((0.40, 0.21, 0.105))
    assert found["pooled"]["acceptance_length"] == pytest.approx(1 + 134 / 110)
    assert found["pooled"]["acceptance_per_position"] == pytest.approx((71 / 110, 42 / 110, 21 / 110))


def test_the_published_rows_give_the_published_average():
    datasets = {
        name: PassCounts(1000, tuple(10 * share for share in shares), 0) for name, (shares, _) in PUBLISHED.items()
    }
    found = made(**datasets)
    average = [74.9, 49.9, 31.9, 20.4, 13.1, 8.5, 5.5]
    shares = found["average"]["acceptance_per_position"]
    assert [100 * share for share in shares] == pytest.approx(average, abs=0.06)  # rounded rows
    assert found["average"]["acceptance_length"] == pytest.approx(3.044, abs=2e-3)
    for name, (_, length) in PUBLISHED.items():
        assert found["datasets"][name]["acceptance_length"] == pytest.approx(length, abs=6e-3)


def test_E01_every_line_of_the_table_pools_its_passes():
    head, *lines = table(made(a=A, b=B))
    assert head == ["dataset", "pos 1", "2", "3", "length", "passes"]
    assert lines[0] == ["a", "70.0", "42.0", "21.0", "2.330", "100"]
    assert lines[2] == ["Average", "40.0", "21.0", "10.5", "1.715", ""]
    assert lines[3] == ["Pooled", "64.5", "38.2", "19.1", "2.218", "110"]


def test_E03_nothing_drafted_is_null_in_json_and_a_dash_in_the_table():
    found = made(a=PassCounts(0, (0, 0), 0))
    for part in (found["pooled"], found["average"], found["datasets"]["a"]):
        assert part["acceptance_length"] is None
        assert part["acceptance_per_position"] is None
    assert found["pooled"]["verifier_passes"] == 0
    assert table(found)[1] == ["a", "-", "-", "-", "0"]
    assert made()["pooled"]["acceptance_length"] is None


def test_E03_a_data_set_without_drafts_does_not_pull_the_average_down():
    found = made(a=A, empty=PassCounts(0, (0, 0, 0), 0))
    assert found["average"]["acceptance_length"] == pytest.approx(2.33)


def test_E05_json_labels_both_kinds_of_rates():
    found = figures(A)
    assert found["acceptance_per_position"] == pytest.approx([0.70, 0.42, 0.21])
    assert found["conditional_acceptance_per_position"] == pytest.approx([0.70, 0.60, 0.50])
    assert found["passes_by_accepted_tokens"] == [30, 28, 21, 21]


def test_X16_acceptance_is_shown_by_context_length():
    found = report({"a": DatasetCounts(A, {"65-128": A}), "b": DatasetCounts(B, {"1025-2048": B, "65-128": A})})
    assert list(found["by_context_length"]) == ["65-128", "1025-2048"]
    assert found["by_context_length"]["65-128"]["verifier_passes"] == 200


def test_a_model_card_shows_the_table_and_the_speed_or_says_nothing():
    found = made(a=A) | {"speed": {"tokens_per_s": 30.0, "plain_tokens_per_s": 20.0}}
    text = card_section(found)
    assert "| Pooled | 70.0 | 42.0 | 21.0 | 2.330 | 100 |" in text
    assert "1.50 times" in text
    assert card_section(None) is card_section(made(a=PassCounts(0, (0,), 0))) is None


def test_the_docstring_example_holds():
    found = expected_speedups((0.8, 0.5), PassCost(10.0, 2.0, 11.0, 2), is_sequential=False)
    assert [e.k for e in found] == [1, 2]
    assert found[0].acceptance_length == pytest.approx(1.8)
    assert found[0].speedup == pytest.approx(1.44)
    assert found[1].speedup == pytest.approx(2.3 * 10 / 13)


def test_a_verifier_that_gets_dear_with_length_makes_a_short_draft_the_best():
    cheap = expected_speedups((0.8, 0.5, 0.3, 0.1), PassCost(10.0, 1.0, 10.5, 4), is_sequential=False)
    dear = expected_speedups((0.8, 0.5, 0.3, 0.1), PassCost(10.0, 1.0, 40.0, 4), is_sequential=False)
    assert best(cheap).k == 4
    assert best(dear).k == 1


def test_sequential_drafting_costs_more_with_each_token():
    at_once = expected_speedups((0.8, 0.5), PassCost(10.0, 4.0, 11.0, 2), is_sequential=False)
    in_turn = expected_speedups((0.8, 0.5), PassCost(10.0, 4.0, 11.0, 2), is_sequential=True)
    assert in_turn[0].speedup > at_once[0].speedup
    assert in_turn[1].speedup == pytest.approx(at_once[1].speedup)


def test_nothing_measured_has_no_best():
    assert best([]) is None


def test_E08_the_servers_own_number_of_drafted_tokens_counts():
    counts = PassCounts(3, (3, 2, 2, 1, 1), 15, drafted=12)
    assert counts.num_draft_tokens == 12
    assert pool([counts, PassCounts(1, (1, 1, 1, 1, 1), 6)], 5).num_draft_tokens == 17
    # Drafts of 5 and 2 tokens: the one that was long enough had all of it accepted.
    assert PassCounts(2, (2, 2, 1, 1, 1), 9, drafted=7).conditional_per_position == (1, 1, 1, 1, 1)


def test_E08_a_conditional_share_that_the_counts_leave_open_is_not_told():
    # 5 + 5 + 2 and 4 + 4 + 4 tokens: position 3 was reached by 2 or 3 drafts, of which 1 was accepted.
    assert PassCounts(3, (3, 3, 1, 0, 0), 0, drafted=12).conditional_per_position[:3] == (1, 1, None)


@pytest.mark.parametrize("seed", range(40))
def test_E08_conditional_shares_are_those_of_the_drafts_or_not_told(seed):
    draw = random.Random(seed)
    depth = draw.randint(1, 5)
    lengths = [draw.randint(1, depth) for _ in range(draw.randint(1, 6))]
    accepted = [draw.randint(0, length) for length in lengths]
    counts = PassCounts(
        len(lengths), tuple(sum(a > k for a in accepted) for k in range(depth)), 0, drafted=sum(lengths)
    )
    for place, share in enumerate(counts.conditional_per_position):
        reached = [a > place for a, n in zip(accepted, lengths) if a >= place and n > place]
        if share is not None:
            assert share == pytest.approx(sum(reached) / len(reached))


def test_E02_tokens_that_reached_the_user_stand_beside_the_acceptance_length():
    """One answer: its first token, then a pass of 5 accepted ones and the bonus, of which the third ends the answer."""
    counts = PassCounts(1, (1, 1, 1, 1, 1), 4, num_answers=1)
    assert counts.acceptance_length == 6
    assert counts.tokens_per_pass == 3
    assert figures(counts)["tokens_per_pass"] == 3
    # Nothing cut, every pass with a draft: both are the same.
    assert PassCounts(10, (7, 4), 22, num_answers=1).tokens_per_pass == pytest.approx(2.1)
    assert PassCounts(10, (7, 4), 22).tokens_per_pass is None


def test_E04_passes_that_checked_no_draft_are_counted():
    counts = PassCounts(1, (1, 1, 1), 104, num_answers=1)
    assert counts.passes_without_draft == 99
    assert counts.acceptance_length == 4
    assert counts.tokens_per_pass == pytest.approx(1.03)
    assert PassCounts(0, (0, 0, 0), 5, num_answers=1).passes_without_draft == 4
    both = pool([counts, PassCounts(10, (7, 4, 0), 22, num_answers=1)], 3)
    assert both.passes_without_draft == 99
    assert both.num_answers == 2


@pytest.mark.parametrize(
    ("accepted", "says"),
    [
        ((80, 5, 2), "position 2 is accepted in 6.2 %"),
        ((90, 80, 4), "position 3 is accepted in 5.0 %"),
        ((60, 0, 0), "position 2 is accepted in 0.0 %"),
        ((30, 50, 20), "not what they are taken for"),
        ((70, 42, 21), None),
        ((50, 25, 12), None),
        ((10, 1, 0), None),
        ((0, 0, 0), None),
    ],
)
def test_X13_a_shape_that_no_trained_drafter_has_is_flagged(accepted, says):
    found = implausible(PassCounts(100, accepted, 0))
    assert (found is None) if says is None else (says in found)


def test_X13_every_published_shape_is_plausible():
    for shares, _ in PUBLISHED.values():
        assert implausible(PassCounts(1000, tuple(10 * share for share in shares), 0)) is None
