"""A server under load is timed by what it streams, and compared with one that has no drafter."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from peagle.errors import ConfigError, EndpointError
from peagle.evaluate.config import EvaluateConfig
from peagle.evaluate.results import Outcome, Served
from peagle.evaluate.served import LoadedServer, Streamed, under_load

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
def servers():
    fast, slow = Streamer(3, 0.05), Streamer(1, 0.15)  # far apart, for machines under load
    clients = [LoadedServer(one.url, None, None, 30.0, 4) for one in (fast, slow)]
    yield fast, slow, *clients
    for one in (*clients, fast, slow):
        one.close()


def test_tokens_that_come_in_bunches_are_counted_one_by_one(servers):
    _, _, client, _ = servers
    found = client.stream([1, 2], SETTINGS)
    assert found.num_tokens == 6
    assert 0.0 < found.first_s < found.last_s
    assert found.between_ms == pytest.approx(1e3 * (found.last_s - found.first_s) / 5)
    assert Streamed(1, 0.1, 0.1).between_ms is None


def test_each_concurrency_is_measured_beside_the_plain_server(servers):
    fast, slow, with_drafter, plain = servers
    points = under_load(with_drafter, plain, [[1], [2, 3]], SETTINGS, (1, 4))
    assert [point["concurrency"] for point in points] == [1, 4]
    assert [point["requests"] for point in points] == [2, 8]
    assert all(point["tokens_per_s"] > point["plain_tokens_per_s"] for point in points)
    assert all(point["itl_ms"] < point["plain_itl_ms"] for point in points)
    assert fast.most <= 4
    assert slow.most == 4
    assert [p["max_tokens"] for p in fast.payloads[:2]] == [1, 1]  # the warm-up
    assert fast.payloads[2]["prompt"] == [1]
    shown = Outcome(4, {}, None, None, Served(10.0, points), [])
    assert shown.figures()["speed"]["by_concurrency"] == points
    assert "4 at once:" in shown.lines()[-1]
    assert "times; first token" in shown.lines()[-1]


def test_without_a_plain_server_there_are_no_plain_figures(servers):
    _, _, client, _ = servers
    (point,) = under_load(client, None, [[1]], SETTINGS, (1,))
    assert not any(key.startswith("plain") for key in point)
    assert "(" not in Outcome(4, {}, None, None, Served(1.0, [point]), []).lines()[-1]


def test_a_server_that_refuses_is_one_line():
    broken = Streamer(1, 0.0, status=500)
    client = LoadedServer(broken.url, None, None, 5.0, 1)
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
