"""A local stub that answers like a vLLM server with the connector: states are a known function of the token ids."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, LAYERS = 8, 64, 8


def states_of(ids: list[int], layers: int) -> torch.Tensor:
    """[num_tokens, layers, HIDDEN]: float32, exact."""
    token = torch.tensor(ids, dtype=torch.float32)[:, None, None]
    layer = torch.arange(layers, dtype=torch.float32)[None, :, None]
    return token + 100 * layer + torch.arange(HIDDEN, dtype=torch.float32) / 16


Fault = Callable[["FakeServer", int, dict[str, Any]], tuple[int, dict[str, Any]] | str | None]


class FakeServer:
    """Serves until `close`. `fault(server, number, payload)` may answer in its stead: a (status, body), or "drop".

    Attributes set before or between requests: `layer_ids`, `max_model_len`, `verifier_config` (overrides of what the
    connector says), `write` (replaces the file writer), `requests` (all completions payloads so far).
    """

    def __init__(self, folder: Path, name: str = "verifier", port: int = 0, fault: Fault | None = None) -> None:
        self.folder, self.name, self.fault = folder / "in-flight", name, fault
        self.layer_ids, self.max_model_len = [2, 4, 5, 8], 256
        self.verifier_config: dict[str, Any] = {}
        self.verifier: Any = None  # a TransformersVerifier whose states and choices are given instead
        self.has_connector = True
        self.health, self.write_delay_s = 200, 0.0
        self.write: Callable[[FakeServer, str, list[int]], None] = FakeServer.write_states
        self.requests: list[dict[str, Any]] = []
        self.chats: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        self.renders: Callable[[dict[str, Any]], list[int]] | None = None
        self.writes: Callable[[list[int]], list[int]] | None = None  # answers of its own, instead of the sums
        self.metrics = ""
        self.most_open = self._open = 0
        self._lock = threading.Lock()
        self._model = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.folder.mkdir(parents=True, exist_ok=True)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                fake._connections.add(self.connection)

            def log_message(self, *args: Any) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle()

            def do_GET(self) -> None:
                if self.path == "/health":
                    self.reply(fake.health, {})
                elif self.path == "/metrics":
                    self.send(200, fake.metrics.encode(), "text/plain")
                elif self.path == "/v1/models" and fake.health == 200:
                    entry = {"id": fake.name, "root": fake.name, "max_model_len": fake.max_model_len}
                    self.reply(200, {"data": [entry]})
                else:
                    self.reply(fake.health if fake.health != 200 else 404, {"message": "no"})

            def do_POST(self) -> None:
                payload = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path == "/tokenize":
                    if fake.renders is None:
                        self.reply(404, {"message": "no"})
                    else:
                        self.reply(200, {"tokens": fake.renders(payload)})
                    return
                with fake._lock:
                    fake.requests.append(payload)
                    number = len(fake.requests)
                    fake._open += 1
                    fake.most_open = max(fake.most_open, fake._open)
                try:
                    answer = fake.fault(fake, number, payload) if fake.fault else None
                    if answer is None:
                        # A real verifier is read through hooks: one request at a time.
                        with fake._model if fake.verifier is not None else contextlib.nullcontext():
                            answer = fake.chat(payload) if "chat" in self.path else fake.complete(payload)
                    if answer == "drop":
                        self.close_connection = True
                        self.connection.close()
                    else:
                        self.reply(*answer)
                except OSError:
                    self.close_connection = True  # the client has gone
                finally:
                    with fake._lock:
                        fake._open -= 1

            def reply(self, status: int, body: dict[str, Any]) -> None:
                self.send(status, json.dumps(body).encode(), "application/json")

            def send(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        """Die: later connections are refused, open ones break."""
        self._http.shutdown()
        self._http.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def rows(self) -> list[list[int]]:
        """Prompts asked for, without the client's probe."""
        return [request["prompt"] for request in self.requests if request.get("prompt") not in (None, [0, 1, 0])]

    def complete(self, payload: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """A completion: the sum of the ids, modulo the vocabulary, then t -> 3 t + 7; the stop token included."""
        ids = payload["prompt"]
        if len(ids) + payload["max_tokens"] > self.max_model_len:
            return 400, {"error": {"message": f"maximum context length is {self.max_model_len}"}}
        generated = [sum(ids) % VOCAB]
        stops = payload.get("stop_token_ids") or []
        while len(generated) < payload["max_tokens"] and generated[-1] not in stops:
            generated.append((3 * generated[-1] + 7) % VOCAB)
        if self.writes is not None:
            generated = self.writes(ids)[: payload["max_tokens"]]
        ended = generated[-1] in stops
        chosen = [sum(ids[: i + 1]) % VOCAB for i in range(len(ids))]
        if self.verifier is not None:
            chosen = self.verifier.run([ids], (2, 4, 5), [list(range(len(ids)))])[0].choice_ids
            generated = chosen[-1:]
        choice: dict[str, Any] = {"token_ids": generated, "finish_reason": "stop" if ended else "length"}
        if payload.get("prompt_logprobs"):
            tops = [{str(token): {"rank": 1, "logprob": -0.1}} for token in chosen[:-1]]
            choice["prompt_logprobs"] = [None, *tops]
        body: dict[str, Any] = {"choices": [choice]}
        name = (payload.get("kv_transfer_params") or {}).get("hidden_states_name")
        if self.has_connector and name:
            body["kv_transfer_params"] = {
                "layer_ids": self.layer_ids,
                "model": self.name,
                "num_layers": LAYERS,
                "hidden_size": HIDDEN,
                "vocab_size": VOCAB,
                "max_model_len": self.max_model_len,
                "hidden_states_path": str(self.folder / f"{name}.safetensors"),
                **self.verifier_config,
            }
            self.write(self, name, ids)
        return 200, body

    def chat(self, payload: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """A chat answer from `chats`."""
        assert self.chats is not None
        return 200, self.chats(payload)

    def write_states(self, name: str, ids: list[int]) -> None:
        """Write a right file, whole."""
        if self.verifier is not None:
            ((aux, last),) = self.verifier.states([ids], (2, 4, 5))
            hidden = last.shape[1]
            self.save(name, ids, torch.cat([aux.view(len(ids), 3, hidden), last[:, None]], 1))
            return
        self.save(name, ids, states_of(ids, len(self.layer_ids)))

    def metadata(self) -> dict[str, str]:
        """What a file says of itself."""
        return {"layer_ids": json.dumps(self.layer_ids), "axes": "tokens layers hidden"}

    def save(self, name: str, ids: list[int], states: torch.Tensor, **metadata: str) -> None:
        """Write any file, aside and renamed, after `write_delay_s`."""
        temporary = self.folder / f".{name}.tmp"
        tensors = {"hidden_states": states, "token_ids": torch.tensor(ids)}
        save_file(tensors, temporary, self.metadata() | metadata)
        if self.write_delay_s:
            time.sleep(self.write_delay_s)
        temporary.rename(self.folder / f"{name}.safetensors")
