from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.main import main
from peagle.config import ServerSettings
from peagle.data.records import Conversation
from peagle.errors import EndpointError
from peagle.verifier.source import GenerationSettings, Prompt, RowAnswer, RowRefused
from peagle.vllm.answers import EndpointAnswers
from tests.fakes import byte_tokenizer, tiny_verifier
from tests.vllm.fake_vllm import VOCAB, FakeServer
from tests.vllm.test_states import verifier_config


def quick(server: FakeServer) -> ServerSettings:
    return ServerSettings(
        endpoint=(server.url,), concurrency=4, request_timeout_s=10.0, max_retries=3, restart_wait_s=1.0
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    fake = FakeServer(tmp_path)
    yield fake
    fake.close()


def settings(**changes: object) -> GenerationSettings:
    values = {"max_new_tokens": 8, "eos_ids": (2,), "temperature": 0.0, "top_p": 1.0, "tail_tokens": 0}
    return GenerationSettings(**(values | changes))  # type: ignore[arg-type]


def source(server: FakeServer, generation: GenerationSettings, name: str = "verifier") -> EndpointAnswers:
    return EndpointAnswers(verifier_config(name), generation, quick(server), False)


def run(src: EndpointAnswers, prompts: list[Prompt]) -> dict[str, RowAnswer | RowRefused]:
    found = {result.row_id: result for result in src.answers(prompts, {prompt.row_id for prompt in prompts})}
    src.close()
    return found


def written(first: int, count: int) -> list[int]:
    ids = [first % VOCAB]
    while len(ids) < count:
        ids.append((3 * ids[-1] + 7) % VOCAB)
    return ids


def test_answers_are_ids_their_end_included_and_what_the_limit_cut_is_marked(server: FakeServer) -> None:
    prompts = [Prompt("stops", [20, 20], 0), Prompt("cut", [1], 0)]
    ends = written(40, 4)[-1]
    found = run(source(server, settings(eos_ids=(ends,))), prompts)
    stops, cut = found["stops"], found["cut"]
    assert isinstance(stops, RowAnswer)
    assert isinstance(cut, RowAnswer)
    assert (stops.generation.ids, stops.generation.finish_reason) == (written(40, 4), "stop")
    assert cut.generation.finish_reason == "length"
    assert cut.generation.ids == written(1, 8)


def test_the_tail_goes_on_past_the_end_and_no_further_than_the_limit(server: FakeServer) -> None:
    server.max_model_len = 12
    found = run(
        source(server, settings(max_new_tokens=4, tail_tokens=3)), [Prompt("a", [1] * 4, 0), Prompt("b", [1] * 9, 0)]
    )
    a, b = found["a"], found["b"]
    assert isinstance(a, RowAnswer)
    assert isinstance(b, RowAnswer)
    assert (len(a.generation.ids), len(a.generation.tail_ids)) == (4, 3)
    assert (len(b.generation.ids), len(b.generation.tail_ids)) == (3, 0)
    tail = next(r for r in server.requests if not r["stop_token_ids"])
    assert tail["prompt"] == [1] * 4 + a.generation.ids
    assert tail["ignore_eos"] is True


def test_nothing_of_the_models_own_generation_settings_gets_in(server: FakeServer) -> None:
    run(source(server, settings()), [Prompt("a", [1], 7)])
    run(source(server, settings(temperature=0.7, top_p=0.9)), [Prompt("a", [1], 7)])
    greedy, sampled = server.requests
    for request in (greedy, sampled):
        assert (request["top_k"], request["min_p"], request["repetition_penalty"]) == (-1, 0.0, 1.0)
        assert (request["presence_penalty"], request["frequency_penalty"]) == (0.0, 0.0)
        assert request["stop_token_ids"] == [2]
    assert (greedy["temperature"], greedy["top_p"], "seed" in greedy) == (0.0, 1.0, False)
    assert (sampled["temperature"], sampled["top_p"], sampled["seed"]) == (0.7, 0.9, 7)


def test_H11_a_refused_prompt_is_listed_and_the_others_go_on(server: FakeServer) -> None:
    server.fault = lambda fake, number, payload: (400, {"message": "no"}) if payload["prompt"] == [5] else None
    found = run(source(server, settings()), [Prompt("a", [5], 0), Prompt("b", [6], 0)])
    assert isinstance(found["a"], RowRefused)
    assert isinstance(found["b"], RowAnswer)


def test_another_model_or_a_server_without_token_ids_is_refused(server: FakeServer) -> None:
    with pytest.raises(EndpointError, match=r"serves verifier, not owner/other; .* --served-model-name verifier"):
        source(server, settings(), "owner/other")
    server.fault = lambda fake, number, payload: (200, {"choices": [{"text": "hi", "finish_reason": "stop"}]})
    with pytest.raises(EndpointError, match="hold no token ids"):
        run(source(server, settings()), [Prompt("a", [1], 0)])


def test_H11_regenerate_goes_on_after_a_stop_with_no_answer_lost_or_doubled(server: FakeServer, tmp_path: Path) -> None:
    verifier = tiny_verifier(tmp_path / "verifier")
    texts = [f"question {i % 9}" for i in range(10)]  # two are the same
    lines = [{"id": f"q{i}", "prompt": text} for i, text in enumerate(texts)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "answers.jsonl"
    arguments = ["regenerate", "--model", str(verifier), "--output", str(output), "--max-new-tokens", "6"]
    arguments += ["--endpoint", server.url, "--concurrency", "1", "--max-retries", "1", "--restart-wait-s", "0.2"]
    server.fault = lambda fake, number, payload: (503, {"message": "busy"}) if number > 6 else None
    assert main([*arguments, "--data", str(data)]) == 2
    assert len(output.read_text().splitlines()) == 6
    asked = len(server.requests)
    server.fault = lambda fake, number, payload: (429, {"message": "wait"}) if number == asked + 1 else None
    shuffled = tmp_path / "again" / "data.jsonl"
    shuffled.parent.mkdir()
    shuffled.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    assert main([*arguments, "--data", str(shuffled)]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({record["id"] for record in records}) == len(records) == 10
    assert len(server.requests) == asked + 5


TOOLS_TEMPLATE = (
    "{%- if tools -%}<tools>{{ tools | tojson }}</tools>{%- endif -%}"
    "{%- for m in messages -%}<|{{ m.role }}|>"
    # as reasoning models' templates do: what was thought in earlier turns is not shown again
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{%- if m.tool_calls -%}<call>{{ m.tool_calls | tojson }}</call>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def regenerated(server: FakeServer, tmp_path: Path, lines: list[dict], *more: str) -> list[dict]:
    """What the command writes for some data, with a template that knows tools and hides earlier reasoning."""
    verifier = tiny_verifier(tmp_path / "verifier")
    (tmp_path / "tools.jinja").write_text(TOOLS_TEMPLATE)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    server.max_model_len = 2048
    arguments = ["regenerate", "--model", str(verifier), "--data", str(tmp_path / "data.jsonl")]
    arguments += ["--output", str(tmp_path / "answers.jsonl"), "--endpoint", server.url, "--concurrency", "2"]
    assert main([*arguments, "--chat-template", str(tmp_path / "tools.jinja"), *more]) == 0
    return [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]


def test_reasoning_is_kept_as_written_and_the_next_turn_shows_what_the_template_shows(
    server: FakeServer, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    said = [*tokenizer.encode("<think>hm</think>yes", add_special_tokens=False), tokenizer.eos_token_id]
    server.writes = lambda ids: said
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]
    first, second = regenerated(server, tmp_path, [{"id": "r", "messages": turns}])
    for record in (first, second):
        assert record["input_ids"][-len(said) :] == said
        assert record["loss_mask"][-len(said) :] == [1] * len(said)
        assert record["finish_reason"] == "stop"
    assert first["messages"][-1]["content"] == "<think>hm</think>yes"
    prompt = tokenizer.decode(second["input_ids"][: -len(said)])
    assert prompt == "<|user|>a<|assistant|>yes<|user|>b<|assistant|>"


def test_tools_reach_the_prompt_and_a_call_is_an_answer_like_any_other(server: FakeServer, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    call = '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call>'
    said = [*tokenizer.encode(call, add_special_tokens=False), tokenizer.eos_token_id]
    server.writes = lambda ids: said
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "weather in Rome?"}]
    (record,) = regenerated(server, tmp_path, [{"messages": messages, "tools": [WEATHER]}])
    prompt = tokenizer.decode(record["input_ids"][: -len(said)])
    assert prompt.startswith(f"<tools>[{json.dumps(WEATHER)}]</tools>")
    assert prompt.endswith("<|system|>s<|user|>weather in Rome?<|assistant|>")
    assert record["messages"][-1]["content"] == call


def test_a_server_that_renders_chats_otherwise_is_named(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer()

    def renders(payload: dict) -> list[int]:
        assert payload["tools"] == [WEATHER]
        text = tokenizer.apply_chat_template(
            payload["messages"],
            tools=payload["tools"],
            chat_template=TOOLS_TEMPLATE,
            add_generation_prompt=True,
            tokenize=False,
        )
        return tokenizer.encode(text, add_special_tokens=False)

    line = {"messages": [{"role": "user", "content": "weather?"}], "tools": [WEATHER]}
    server.renders = renders
    regenerated(server, tmp_path, [line])
    assert "otherwise" not in capsys.readouterr().err
    server.renders = lambda payload: [*renders(payload)[:9], 3]
    regenerated(server, tmp_path, [line], "--overwrite")
    assert "otherwise than the template in use here (from token 9 on)" in " ".join(capsys.readouterr().err.split())


def test_a_part_of_an_answer_that_the_server_dropped_is_asked_for_again(server: FakeServer) -> None:
    cut = {"choices": [{"token_ids": [1, 2], "finish_reason": "abort"}]}
    server.fault = lambda fake, number, payload: (200, cut) if number == 1 else None
    found = run(source(server, settings()), [Prompt("a", [1], 0)])["a"]
    assert isinstance(found, RowAnswer)
    assert found.generation.ids == written(1, 6)
    server.fault = lambda fake, number, payload: (200, cut)
    with pytest.raises(EndpointError, match="ended one answer early 4 times"):
        run(source(server, settings()), [Prompt("a", [1], 0)])


def as_chat(payload: dict[str, Any]) -> dict[str, Any]:
    """What a chat server answers: it renders messages as their lengths; its parsers leave half of the answer out."""
    rendered = [len(message["content"]) for message in payload["messages"]] + [9] * len(payload.get("tools", ()))
    ids = [5, 6, 2] if payload["stop_token_ids"] else [7]
    choice = {"message": {"content": "half"}, "token_ids": ids, "finish_reason": "tool_calls"}
    return {"prompt_token_ids": rendered, "choices": [choice]}


def test_chats_are_rendered_by_the_server_and_kept_as_it_says(server: FakeServer) -> None:
    server.chats = as_chat
    generation = settings(tail_tokens=2)
    made = EndpointAnswers(verifier_config("verifier"), generation, quick(server), True)
    messages = ({"role": "system", "content": "sys"}, {"role": "user", "content": "hello"})
    tools = ({"type": "function", "function": {"name": "f"}},)
    asked = Conversation(
        row_id="a",
        source="x",
        origin="x",
        line=1,
        messages=messages,
        tools=tools,
        template_options={"enable_thinking": False},
        next_turns=(),
        repairs=(),
    )
    found = run(made, [Prompt("a", [1, 1], 3, asked)])["a"]
    assert isinstance(found, RowAnswer)
    assert found.prompt_ids == [3, 5, 9]
    assert found.generation.ids == [5, 6, 2]  # the parsers' word is not asked
    assert found.generation.finish_reason == "stop"
    chat, tail = server.requests
    assert chat["messages"] == list(messages)
    assert (chat["tools"], chat["tool_choice"]) == (list(tools), "none")
    assert chat["chat_template_kwargs"] == {"enable_thinking": False}
    assert (chat["stop_token_ids"], chat["ignore_eos"], chat["repetition_penalty"]) == ([2], True, 1.0)
    assert tail["prompt"] == [3, 5, 9, 5, 6, 2]  # goes on where the server's own prompt and answer end
    assert len(found.generation.tail_ids) == 2


def test_a_chat_server_that_does_not_say_what_it_rendered_is_refused(server: FakeServer) -> None:
    server.chats = lambda payload: {"choices": as_chat(payload)["choices"]}
    made = EndpointAnswers(verifier_config("verifier"), settings(), quick(server), True)
    asked = Conversation(
        row_id="a",
        source="x",
        origin="x",
        line=1,
        messages=({"role": "user", "content": "hello"},),
        tools=(),
        template_options={},
        next_turns=(),
        repairs=(),
    )
    with pytest.raises(EndpointError, match="hold no token ids"):
        run(made, [Prompt("a", [1], 0, asked)])


def test_regenerate_chat_keeps_what_the_server_rendered(server: FakeServer, tmp_path: Path) -> None:
    server.chats = as_chat
    verifier = tiny_verifier(tmp_path / "verifier")
    data, output = tmp_path / "data.jsonl", tmp_path / "answers.jsonl"
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "?"}]
    data.write_text(json.dumps({"id": "q", "messages": [*turns, {"role": "user", "content": "again"}]}) + "\n")
    arguments = ["regenerate", "--model", str(verifier), "--data", str(data), "--output", str(output)]
    assert main([*arguments, "--chat"]) == 2  # it asks a server, and none is named
    assert main([*arguments, "--chat", "--endpoint", server.url]) == 0
    first, second = (json.loads(line) for line in output.read_text().splitlines())
    assert first["input_ids"] == [3, 5, 6, 2]
    assert first["loss_mask"] == [0, 1, 1, 1]
    assert [request["messages"][-1]["content"] for request in server.requests] == ["one", "again"]
    said = server.requests[1]["messages"][1]
    assert said["role"] == "assistant"
    assert second["input_ids"][-3:] == [5, 6, 2]
    assert main([*arguments, "--endpoint", server.url]) == 2  # token ids make other answers: not mixed into one file
