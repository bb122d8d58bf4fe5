"""One normaliser for the turns of every conversation layout: role and key aliases, content parts, tool calls."""

from __future__ import annotations

import json
from typing import Any

from peagle.data.conversation import Message, UnusableRow

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_response": "tool",
}
ROLE_KEYS = ("role", "from", "speaker")
CONTENT_KEYS = ("content", "value", "text", "message")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
CALL_ROLES = ("function_call", "tool_call")
MAX_SHOWN = 60


def turn(raw: Any) -> tuple[Message, set[str]]:
    """Bring one turn of any layout to a `Message`.

    Returns:
        The message, and the repairs that were needed.

    Raises:
        UnusableRow: not an object, an unknown role, content that is not text, or a tool call that cannot be read.
    """
    if not isinstance(raw, dict):
        raise UnusableRow("turn is not an object", f"found {shown(raw)}")
    repairs: set[str] = set()
    role_name = _role_name(raw)
    role = ROLES.get(role_name)
    if role is None:
        raise UnusableRow("unknown role", f"{role_name!r}; known are {', '.join(sorted(ROLES))}")
    found = next((raw[key] for key in CONTENT_KEYS if raw.get(key) is not None), None)
    reasoning = next((raw[key] for key in REASONING_KEYS if raw.get(key) not in (None, "")), None)
    calls = _raw_calls(raw)
    if role_name in CALL_ROLES and not calls:
        calls, found = _calls_in_text(found), None
    text, part_reasoning, part_calls = _content(found, role, repairs)
    calls = calls + part_calls
    if reasoning is None:
        reasoning = part_reasoning or None
    if found is None and not calls and reasoning is None:
        raise UnusableRow("no content", f"a {role} turn has none of {', '.join(CONTENT_KEYS)}")
    message: Message = {"role": role, "content": clean(text, repairs)}
    if reasoning is not None and role == "assistant":
        if not isinstance(reasoning, str):
            raise UnusableRow("unsupported content", f"reasoning is {shown(reasoning)}, expected text")
        message["reasoning_content"] = clean(reasoning, repairs)
    if calls:
        if role != "assistant":
            raise UnusableRow("bad tool call", f"a {role} turn cannot call tools")
        message["tool_calls"] = [tool_call(call, repairs) for call in calls]
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if isinstance(raw.get(key), str):
                message[key] = clean(raw[key], repairs)
    return message, repairs


def _role_name(raw: dict[str, Any]) -> str:
    role = next((raw[key] for key in ROLE_KEYS if raw.get(key) is not None), None)
    if role is None:
        raise UnusableRow("unknown role", f"a turn has none of {', '.join(ROLE_KEYS)}")
    if not isinstance(role, str):
        raise UnusableRow("unknown role", f"found {shown(role)}, expected text")
    return role.strip().lower()


def _content(found: Any, role: str, repairs: set[str]) -> tuple[str, str, list[Any]]:
    """Text, reasoning and tool calls of a turn's content: text, a number, or a list of parts."""
    if found is None:
        return "", "", []
    if isinstance(found, str):
        return found, "", []
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        repairs.add("number taken as text")
        return json.dumps(found), "", []
    if isinstance(found, dict) and role == "tool":
        repairs.add("tool result written as JSON")
        return json.dumps(found, ensure_ascii=False), "", []
    if not isinstance(found, list):
        raise UnusableRow("unsupported content", f"found {shown(found)}, expected text or a list of parts")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    for part in found:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise UnusableRow("unsupported content", f"found the part {shown(part)}")
        kind = part.get("type", "text")
        value = next((part[key] for key in ("text", "content", "value", "thinking", "reasoning") if key in part), None)
        if kind in ("text", "input_text", "output_text") and isinstance(value, str):
            texts.append(value)
        elif kind in ("thinking", "reasoning") and isinstance(value, str):
            thoughts.append(value)
        elif kind == "tool_use" and role == "assistant":
            calls.append(part)
        else:
            raise UnusableRow("unsupported content", f"found a part of type {kind!r}; only text can be used")
    return "".join(texts), "".join(thoughts), calls


def _raw_calls(raw: dict[str, Any]) -> list[Any]:
    calls = raw.get("tool_calls")
    if calls is None and raw.get("function_call") is not None:
        calls = [raw["function_call"]]
    if calls is None or calls == "":
        return []
    if isinstance(calls, str):
        calls = _parsed(calls, "tool_calls")
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise UnusableRow("bad tool call", f"tool_calls is {shown(calls)}, expected a list")
    return calls


def _calls_in_text(found: Any) -> list[Any]:
    """Calls of a ShareGPT `function_call` turn, whose value is JSON text."""
    if isinstance(found, str):
        found = _parsed(found, "the function_call turn")
    calls = found if isinstance(found, list) else [found]
    if not calls:
        raise UnusableRow("bad tool call", "a function_call turn without a call")
    return calls


def tool_call(raw: Any, repairs: set[str]) -> dict[str, Any]:
    """Bring a tool call to OpenAI's shape, its arguments an object (never JSON text, which would be encoded twice)."""
    if not isinstance(raw, dict):
        raise UnusableRow("bad tool call", f"found {shown(raw)}, expected an object")
    inner = raw.get("function")
    function: dict[str, Any] = inner if isinstance(inner, dict) else raw
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise UnusableRow("bad tool call", f"no name in {shown(raw)}")
    arguments = next((function[k] for k in ("arguments", "parameters", "args", "input") if k in function), None)
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"the arguments of {name}") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise UnusableRow("bad tool call", f"the arguments of {name} are {shown(arguments)}, expected an object")
    call = {"type": "function", "function": {"name": clean(name, repairs), "arguments": deep_clean(arguments, repairs)}}
    if isinstance(raw.get("id"), str):
        call["id"] = clean(raw["id"], repairs)
    return call


def tool_declarations(raw: Any, repairs: set[str]) -> tuple[dict[str, Any], ...]:
    """Tool declarations of a row: a list or its JSON text; bare functions are wrapped as OpenAI has them."""
    if isinstance(raw, str):
        raw = _parsed(raw, "tools") if raw.strip() else None
    if raw is None:
        return ()
    if isinstance(raw, dict):
        raw = [raw]
    if not isinstance(raw, list):
        raise UnusableRow("bad tool declaration", f"tools is {shown(raw)}, expected a list")
    out = []
    for item in raw:
        if not isinstance(item, dict):
            raise UnusableRow("bad tool declaration", f"found {shown(item)}, expected an object")
        is_wrapped = isinstance(item.get("function"), dict)
        wrapped: dict[str, Any] = item if is_wrapped else {"type": "function", "function": item}
        if not isinstance(wrapped["function"].get("name"), str):
            raise UnusableRow("bad tool declaration", f"no name in {shown(item)}")
        out.append(deep_clean(wrapped, repairs))
    return tuple(out)


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UnusableRow("bad tool call", f"{what}: not JSON: {shown(text)}") from None


def clean(text: str, repairs: set[str]) -> str:
    """Text that can be written as UTF-8: halves of a surrogate pair are joined, lone ones become U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        repairs.add("lone surrogate replaced")
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def deep_clean(value: Any, repairs: set[str]) -> Any:
    """`clean` for all text inside a JSON value."""
    if isinstance(value, str):
        return clean(value, repairs)
    if isinstance(value, list):
        return [deep_clean(item, repairs) for item in value]
    if isinstance(value, dict):
        return {clean(str(key), repairs): deep_clean(item, repairs) for key, item in value.items()}
    return value


def shown(value: Any) -> str:
    """A value for a one-line message."""
    text = ascii(value) if not isinstance(value, str) else ascii(value[: MAX_SHOWN + 1])
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
