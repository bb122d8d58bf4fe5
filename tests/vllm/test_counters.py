import pytest

from peagle.errors import EndpointError
from peagle.vllm.counters import difference, read_metrics


def text(drafts: dict[str, int], first: dict[str, int]) -> str:
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts."]
    for engine, count in drafts.items():
        labels = f'engine="{engine}",model_name="m"'
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {count}.0",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {2 * count}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {first[engine] + 1}",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} {first[engine]}',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 1.0',
            f"vllm:generation_tokens_total{{{labels}}} {3 * count}",
        ]
    return "\n".join(lines)


ZERO = text({"0": 0, "1": 0}, {"0": 0, "1": 0}).replace('position="1"} 1.0', 'position="1"} 0.0')


def test_E09_all_engines_are_summed():
    after = read_metrics(text({"0": 50, "1": 50}, {"0": 30, "1": 10}), None)
    assert after.engines == ["0", "1"]
    counts = difference(read_metrics(ZERO, None), after)
    assert counts.num_drafts == 100
    assert counts.accepted_per_position == (40, 2)
    assert counts.num_generated_tokens == 300


def test_E09_figures_are_the_difference_of_two_readings():
    before = read_metrics(text({"0": 50, "1": 50}, {"0": 30, "1": 10}), "m")
    counts = difference(before, read_metrics(text({"0": 60, "1": 60}, {"0": 31, "1": 11}), "m"))
    assert counts.num_drafts == 20
    assert counts.accepted_per_position == (2, 0)


@pytest.mark.parametrize("second", [{"0": 10, "1": 10}, {"0": 80, "1": 10}, {"0": 80}])
def test_E09_a_restart_of_any_engine_is_reported(second):
    before = read_metrics(text({"0": 50, "1": 50}, {"0": 30, "1": 10}), None)
    after = read_metrics(text(second, {"0": 30, "1": 10}), None)
    with pytest.raises(EndpointError, match="restarted"):
        difference(before, after)


def test_a_server_without_a_drafter_is_named_as_such():
    reading = read_metrics('vllm:generation_tokens_total{engine="0"} 7', None)
    with pytest.raises(EndpointError, match="without a drafter"):
        difference(reading, reading)


def test_another_models_counters_do_not_count():
    both = text({"0": 50}, {"0": 30}) + "\n" + text({"0": 900}, {"0": 9}).replace('"m"', '"other"')
    assert difference(read_metrics("", "m"), read_metrics(both, "m")).num_drafts == 50


def test_E08_drafted_tokens_are_the_servers_own():
    assert (
        difference(
            read_metrics(ZERO, None), read_metrics(text({"0": 50, "1": 0}, {"0": 30, "1": 0}), None)
        ).num_draft_tokens
        == 100
    )
    without = "\n".join(line for line in text({"0": 5}, {"0": 3}).splitlines() if "draft_tokens" not in line)
    assert difference(read_metrics("", None), read_metrics(without, None)).num_draft_tokens is None


def test_E10_a_server_without_counters_by_position_is_told_what_it_lacks():
    page = "\n".join(line for line in text({"0": 12}, {"0": 3}).splitlines() if "per_pos" not in line)
    with pytest.raises(EndpointError, match="has no vllm:spec_decode_num_accepted_tokens_per_pos"):
        difference(read_metrics("", None), read_metrics(page, None))
