from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from peagle.config import ServerSettings
from peagle.errors import ConfigError, EndpointError
from peagle.evaluate import served as served_module
from peagle.evaluate.config import EvaluateConfig
from peagle.evaluate.results import Measurement, lines
from peagle.evaluate.served import LoadedServer, ServedDrafter, Streamed, under_load
from peagle.verifier.source import GenerationSettings, Prompt
from tests.vllm.fake_vllm import FakeServer
from tests.vllm.test_states import verifier_config

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
    monkeypatch.setattr(served_module, "_SETTLE_PAUSE_S", 0.02)
    fake = Counting(tmp_path)
    yield fake
    fake.close()


def drafter(server: FakeServer) -> ServedDrafter:
    return ServedDrafter(
        verifier_config(),
        GREEDY,
        ServerSettings(endpoint=(server.url,), concurrency=2, max_retries=1, restart_wait_s=1.0),
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


# Under load: timed by what a server streams.

SETTINGS = {"max_tokens": 6, "temperature": 0.0}


class Streamer:
    """Streams six tokens per answer, `bunch` at a time with a pause before each; counts what is under way."""

    def __init__(self, bunch: int, pause_s: float, status: int = 200) -> None:
        self.payloads, self.most, self._open, self._lock = [], 0, 0, threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                self._send(200, json.dumps({"data": [{"id": "m", "root": "m", "max_model_len": 99}]}).encode())

            def do_POST(self):
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if status != 200:
                    self._send(status, b'{"message": "no"}')
                    return
                with fake._lock:
                    fake.payloads.append(payload)
                    fake._open += 1
                    fake.most = max(fake.most, fake._open)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for start in range(0, payload["max_tokens"], bunch):
                    time.sleep(pause_s)
                    ids = list(range(start, min(start + bunch, payload["max_tokens"])))
                    self._event({"choices": [{"token_ids": ids, "text": "x"}]})
                self._event({"choices": [], "usage": {"completion_tokens": payload["max_tokens"]}})
                self.wfile.write(b"data: [DONE]\n\n")
                with fake._lock:
                    fake._open -= 1

            def _event(self, body):
                self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())

            def _send(self, code, body):
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def streamers():
    fast, slow = Streamer(3, 0.01), Streamer(1, 0.01)
    clients = [LoadedServer(one.url, ServerSettings(concurrency=4, request_timeout_s=30.0)) for one in (fast, slow)]
    yield fast, slow, *clients
    for one in (*clients, fast, slow):
        one.close()


def test_tokens_that_come_in_bunches_are_counted_one_by_one(streamers):
    _, _, client, _ = streamers
    found = client.stream([1, 2], SETTINGS)
    assert found.num_tokens == 6
    assert 0.0 < found.first_s < found.last_s
    assert found.between_ms == pytest.approx(1e3 * (found.last_s - found.first_s) / 5)
    assert Streamed(1, 0.1, 0.1).between_ms is None


def test_each_concurrency_is_measured_beside_the_plain_server(streamers):
    fast, slow, with_drafter, plain = streamers
    points = under_load(with_drafter, plain, [[1], [2, 3]], SETTINGS, (1, 4))
    assert [point["concurrency"] for point in points] == [1, 4]
    assert [point["requests"] for point in points] == [2, 8]
    for key in ("tokens_per_s", "ttft_ms", "itl_ms"):
        assert all(point[key] > 0 and point[f"plain_{key}"] > 0 for point in points)
    assert max(fast.most, slow.most) <= 4
    assert len(fast.payloads) == len(slow.payloads) == 2 + 2 + 8
    assert [p["max_tokens"] for p in fast.payloads[:2]] == [1, 1]  # the warm-up
    assert fast.payloads[2]["prompt"] == [1]
    evaluation = Measurement(
        depth=4, datasets={}, notes=[], served={"tokens_per_s": 10.0, "by_concurrency": points}
    ).figures()
    assert evaluation["speed"]["by_concurrency"] == points
    assert "4 at once:" in lines(evaluation)[-1]
    assert "times; first token" in lines(evaluation)[-1]


def test_as_many_requests_are_under_way_as_were_asked_for(streamers, monkeypatch):
    _, _, client, _ = streamers
    barrier = threading.Barrier(4)

    def stream(*_) -> Streamed:
        barrier.wait(timeout=60)  # passes only if four are there at once
        return Streamed(6, 0.1, 0.6)

    monkeypatch.setattr(client, "stream", stream)
    assert client.measure([[1], [2]], SETTINGS, 4)["requests"] == 8


def test_latencies_are_medians_over_the_answers(streamers, monkeypatch):
    _, _, client, _ = streamers
    answers = iter([Streamed(6, 0.1, 0.6), Streamed(6, 0.2, 0.8), Streamed(1, 0.9, 0.9)])
    monkeypatch.setattr(client, "stream", lambda *_: next(answers))
    point = client.measure([[1], [2], [3]], SETTINGS, 1)
    assert point["ttft_ms"] == pytest.approx(200)
    assert point["itl_ms"] == pytest.approx(110)  # of the two that have more than one token


def test_without_a_plain_server_there_are_no_plain_figures(streamers):
    _, _, client, _ = streamers
    (point,) = under_load(client, None, [[1]], SETTINGS, (1,))
    assert not any(key.startswith("plain") for key in point)
    outcome = Measurement(depth=4, datasets={}, notes=[], served={"tokens_per_s": 1.0, "by_concurrency": [point]})
    assert "(" not in lines(outcome.figures())[-1]


def test_a_server_that_refuses_is_one_line():
    broken = Streamer(1, 0.0, status=500)
    client = LoadedServer(broken.url, ServerSettings(concurrency=1, request_timeout_s=5.0))
    with pytest.raises(EndpointError, match="status 500"):
        client.stream([1], SETTINGS)
    client.close()
    broken.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"concurrencies": [1]}, "give its --endpoint"),
        ({"endpoint": ["http://x"], "plain_endpoint": "http://y"}, "name some, such as 1 4 16"),
        ({"endpoint": ["http://x"], "concurrencies": [0]}, "at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        EvaluateConfig.build({"checkpoint": "c", "data": ["d"], **given})
