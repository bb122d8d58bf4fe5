import io

from rich.console import Console

from peagle.evaluate.counts import DatasetCounts, PassCounts
from peagle.evaluate.results import Measurement, lines, markdown, show, verdict

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


def test_E04_nothing_drafted_is_given_its_true_reason():
    assert "4 passes checked no draft" in verdict(PassCounts(0, (0, 0), 5, num_answers=1), None)
    assert "no prompt got past its first token" in verdict(PassCounts(0, (0, 0), 3, num_answers=3), None)


def test_E02_E04_both_lengths_and_the_passes_without_a_draft_are_shown():
    said = "\n".join(lines(evaluation({"a": PassCounts(1, (1, 1, 1), 104, num_answers=1)})))
    assert "1.030 reached the user, acceptance length 4.000; 99 passes or more checked no draft" in said


def test_X08_nothing_accepted_of_many_is_a_failure_with_its_causes_in_order():
    def sound(accepted, passes):
        counts = {"a": DatasetCounts(PassCounts(passes, (accepted, 0), 0), {})}
        return Measurement(depth=2, datasets=counts, notes=[]).is_sound

    assert not sound(0, 1940)
    assert sound(1, 1940)
    assert sound(0, 20)
    assert not sound(0, 0)
    said = verdict(PassCounts(1940, (0, 0), 0), 5000)
    assert said.index("float16") < said.index("another verifier") < said.index("5000 rows")
