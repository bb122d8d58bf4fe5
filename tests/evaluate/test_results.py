import io

from rich.console import Console

from peagle.evaluate.counts import DatasetCounts, PassCounts
from peagle.evaluate.results import Measurement, markdown, show, verdict

A, B = PassCounts(100, (70, 42, 21), 250), PassCounts(10, (1, 0, 0), 12)


def evaluation(datasets: dict[str, PassCounts], *notes: str) -> dict:
    return Measurement(
        depth=3, datasets={name: DatasetCounts(one, {}) for name, one in datasets.items()}, notes=notes
    ).figures()


def test_E01_the_pooled_row_is_labelled_and_the_convention_stands_beside_it():
    text = markdown(evaluation({"a": A, "b": B}, "K = 3, trained for 2"))
    assert "| a | 70.0 | 42.0 | 21.0 | 2.330 | 100 |" in text
    assert "| Pooled | 64.5 | 38.2 | 19.1 | 2.218 | 110 |" in text
    assert text.startswith("> K = 3, trained for 2\n")
    assert text.index("| Average") < text.index("| Pooled") < text.index("bonus")


def test_E03_nothing_measured_or_drafted_has_its_own_words():
    assert "Nothing was measured." in markdown(evaluation({}))
    assert "| a | - | - | - | - | 0 |" in markdown(evaluation({"a": PassCounts(0, (0, 0, 0), 0)}))
    assert "nothing was drafted" in verdict(PassCounts(0, (0, 0), 0), None)


def test_E11_a_hopeless_drafter_is_told_so_with_its_number_of_rows():
    said = verdict(PassCounts(3, (0, 0, 0, 0), 3), 20)
    assert "0/12" in said
    assert "20 rows" in said
    assert verdict(A, 20) is None


def test_the_terminal_has_a_column_per_position_and_the_notes():
    console = Console(width=120, record=True, file=io.StringIO())
    show(evaluation({"a": A, "b": B}, "mind [this]"), "acceptance", console)
    text = console.export_text()
    assert "70.0" in text
    assert "note: mind [this]" in text
    assert text.index("Average") < text.index("Pooled")
