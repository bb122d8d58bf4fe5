from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle.errors import EndpointError
from peagle.evaluate import served as endpoint_module
from peagle.evaluate.gap import explain_gap
from peagle.evaluate.served import ServedDrafter
from peagle.regenerate.answers import Prompt
from peagle.regenerate.generation import GenerationSettings
from peagle.vllm.answers import AnswerEndpoints
from peagle.vllm.client import RetryPolicy
from tests.vllm.fake_vllm import FakeServer
from tests.vllm.test_endpoint import verifier_config

GREEDY = GenerationSettings(max_new_tokens=6, eos_ids=(99,), temperature=0.0, top_p=1.0, tail_tokens=0)


class Counting(FakeServer):
    """A server whose counters move by fixed steps per prompt, on two engines in turn."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.answered = self.extra = 0
        self.drafts = [100.0, 7.0]
        self.accepted = [[60.0, 20.0], [3.0, 1.0]]
        self.generated = [500.0, 90.0]
        self.fault = self.count
        self.publish()

    def count(self, fake: FakeServer, number: int, payload: dict) -> None:
        engine = self.answered % 2
        self.answered += 1
        self.drafts[engine] += 2
        self.accepted[engine][0] += 1
        self.accepted[engine][1] += engine
        self.generated[engine] += 6 + self.extra
        self.publish()

    def publish(self) -> None:
        lines = []
        for engine in (0, 1):
            labels = f'engine="{engine}",model_name="verifier"'
            lines.append(f"vllm:spec_decode_num_drafts_total{{{labels}}} {self.drafts[engine]}")
            lines.append(f"vllm:generation_tokens_total{{{labels}}} {self.generated[engine]}")
            for k, value in enumerate(self.accepted[engine]):
                name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                lines.append(f'{name}{{{labels},position="{k}"}} {value}')
        self.metrics = "\n".join(lines)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    monkeypatch.setattr(endpoint_module, "_SETTLE_PAUSE_S", 0.02)
    fake = Counting(tmp_path)
    yield fake
    fake.close()


def drafter(server: FakeServer) -> ServedDrafter:
    return ServedDrafter(
        verifier_config(), GREEDY, AnswerEndpoints((server.url,), None, None, 2, RetryPolicy(10.0, 1, 1.0))
    )


PROMPTS = [Prompt(f"p{i}", [i + 3, 4], 0) for i in range(10)]


def test_E09_counts_are_differences_summed_over_engines(server: Counting, caplog: pytest.LogCaptureFixture) -> None:
    served = drafter(server)
    with caplog.at_level(logging.WARNING, "peagle"):
        for _ in range(2):  # what was counted before a run is not in it
            run = served.run(PROMPTS)
            assert run.counts.num_drafts == 20
            assert run.counts.accepted_per_position == (10, 5)
            assert run.counts.acceptance_length == 1 + 15 / 20
            assert len(run.generations) == 10
    served.close()
    assert not caplog.records


def test_somebody_elses_tokens_in_the_figures_are_said(server: Counting, caplog: pytest.LogCaptureFixture) -> None:
    served = drafter(server)
    server.extra = 1
    with caplog.at_level(logging.WARNING, "peagle"):
        served.run(PROMPTS)
    assert "counted 70 generated tokens, our answers have 60" in caplog.text
    served.close()


def test_E09_a_restart_between_the_readings_is_reported(server: Counting) -> None:
    served = drafter(server)

    def restarted(fake: FakeServer, number: int, payload: dict) -> None:
        server.drafts = [2.0, 0.0]
        server.publish()

    server.fault = restarted
    with pytest.raises(EndpointError, match="restarted"):
        served.run(PROMPTS)
    served.close()


def test_a_server_without_a_drafter_is_refused_before_the_run(server: Counting) -> None:
    server.metrics = 'vllm:generation_tokens_total{engine="0",model_name="verifier"} 3'
    with pytest.raises(EndpointError, match="runs without a drafter"):
        drafter(server)
    assert server.requests == []


def test_X04_a_gap_between_offline_and_served_is_explained_and_equal_figures_are_not() -> None:
    said = explain_gap((0.70, 0.48, 0.31), (0.23, 0.07, 0.02))
    assert said is not None
    assert "another head or embedding" in said
    assert "0.70 -> 0.23" in said
    assert explain_gap((0.70, 0.48, 0.31), (0.70, 0.48, 0.31)) is None
    assert explain_gap((0.70, 0.48, 0.31), (0.72, 0.45, 0.30)) is None
    deep = explain_gap((0.70, 0.48, 0.31), (0.69, 0.07, 0.02))
    assert deep is not None
    assert "mask_hidden" in deep
