import io
import json
import math

import pytest
from rich.console import Console

from peagle.evaluate import results as table
from peagle.evaluate.counts import Counts, DatasetCounts

A, B = Counts(100, (70, 42, 21), 250), Counts(10, (1, 0, 0), 12)

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


def test_average_is_the_plain_mean_of_the_rows_and_pooled_sums_passes():
    laid = {row.name: row for row in table.rows({"a": A, "b": B})}
    assert list(laid) == ["a", "b", "Average", "Pooled"]
    assert laid["Average"].length == pytest.approx((2.33 + 1.1) / 2)
    assert laid["Average"].per_position == pytest.approx((0.40, 0.21, 0.105))
    assert laid["Pooled"].length == pytest.approx(1 + 134 / 110)
    assert laid["Pooled"].per_position == pytest.approx((71 / 110, 42 / 110, 21 / 110))


def test_the_published_rows_give_the_published_average():
    datasets = {name: Counts(1000, tuple(10 * share for share in shares), 0) for name, (shares, _) in PUBLISHED.items()}
    laid = {row.name: row for row in table.rows(datasets)}
    average = [74.9, 49.9, 31.9, 20.4, 13.1, 8.5, 5.5]
    assert [100 * share for share in laid["Average"].per_position] == pytest.approx(average, abs=0.06)  # rounded rows
    assert laid["Average"].length == pytest.approx(3.044, abs=2e-3)
    for name, (_, length) in PUBLISHED.items():
        assert laid[name].length == pytest.approx(length, abs=6e-3)


def test_E01_the_pooled_row_is_labelled_and_the_convention_stands_beside_it():
    text = table.markdown({"a": A, "b": B}, ["K = 3, trained for 2"])
    assert "| a | 70.0 | 42.0 | 21.0 | 2.330 | 100 |" in text
    assert "| Pooled | 64.5 | 38.2 | 19.1 | 2.218 | 110 |" in text
    assert text.startswith("> K = 3, trained for 2\n")
    assert text.index("| Average") < text.index("| Pooled") < text.index("bonus")


def test_E03_nothing_drafted_is_null_in_json_and_a_dash_in_the_table():
    empty = Counts(0, (0, 0), 0)
    made = json.loads(json.dumps(table.report({"a": DatasetCounts(empty, {})}), allow_nan=False))
    for part in (made["pooled"], made["average"], made["datasets"]["a"]):
        assert part["acceptance_length"] is None
        assert part["acceptance_per_position"] is None
    assert made["pooled"]["verifier_passes"] == 0
    assert "| a | - | - | - | 0 |" in table.markdown({"a": empty}, [])
    assert "nothing was drafted" in table.verdict(empty, None)
    assert table.report({})["pooled"]["acceptance_length"] is None
    table.markdown({}, [])


def test_E03_a_data_set_without_drafts_does_not_pull_the_average_down():
    laid = {row.name: row for row in table.rows({"a": A, "empty": Counts(0, (0, 0, 0), 0)})}
    assert laid["Average"].length == pytest.approx(2.33)
    assert not any(math.isnan(row.length) for row in laid.values() if row.length is not None)


def test_E05_json_labels_both_kinds_of_rates():
    made = table.figures(A)
    assert made["acceptance_per_position"] == pytest.approx([0.70, 0.42, 0.21])
    assert made["conditional_acceptance_per_position"] == pytest.approx([0.70, 0.60, 0.50])
    assert made["passes_by_accepted_tokens"] == [30, 28, 21, 21]


def test_E11_a_hopeless_drafter_is_told_so_with_its_number_of_rows():
    said = table.verdict(Counts(3, (0, 0, 0, 0), 3), 20)
    assert "0/12" in said
    assert "20 rows" in said
    assert table.verdict(A, 20) is None


def test_X16_acceptance_is_shown_by_context_length():
    made = table.report({"a": DatasetCounts(A, {"65-128": A}), "b": DatasetCounts(B, {"1025-2048": B, "65-128": A})})
    assert list(made["by_context_length"]) == ["65-128", "1025-2048"]
    assert made["by_context_length"]["65-128"]["verifier_passes"] == 200


def test_the_terminal_table_has_a_column_per_position():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table.terminal({"a": A, "b": B}, "acceptance"))
    assert "70.0" in console.export_text()
