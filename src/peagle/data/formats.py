"""One normaliser for every conversation layout: which one a record has, its turns, tool calls, repairs and token rows.

A new layout is a few keys in the tables here, or a branch in `_turns`.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from peagle.data.records import Message, UnusableRow

_ROLE_NAMES = {
    "system": "system developer",
    "user": "user human prompter",
    "assistant": "assistant gpt chatgpt bing bard bot chatbot model ai function_call tool_call",
    "tool": "tool function observation ipython tool_response tool_result function_response",
}
ROLES = {name: role for role, names in _ROLE_NAMES.items() for name in names.split()}
ROLE_KEYS = ("role", "from", "speaker")
CONTENT_KEYS = ("content", "value", "text", "message")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
CALL_ROLES = ("function_call", "tool_call")
MAX_SHOWN = 60


def turn(raw: Any, repairs: set[str]) -> Message:
    """Bring one turn of any layout to a `Message`, adding to `repairs` what it took.

    Raises:
        UnusableRow: not an object, an unknown role, content that is not text, or a tool call that cannot be read.
    """
    # 1. Who speaks.
    if not isinstance(raw, dict):
        raise UnusableRow("turn is not an object", f"found {shown(raw)}")
    speaker = first_of(raw, ROLE_KEYS)
    if not isinstance(speaker, str):
        raise UnusableRow("unknown role", f"found {shown(speaker)}, expected text under {', '.join(ROLE_KEYS)}")
    role_name = speaker.strip().lower()
    role = ROLES.get(role_name)
    if role is None:
        raise UnusableRow("unknown role", f"{role_name!r}; known are {', '.join(sorted(ROLES))}")

    # 2. Content, reasoning and calls, each in one of several places.
    content = first_of(raw, CONTENT_KEYS)
    reasoning = first_of(raw, REASONING_KEYS, "")
    function, calls = raw.get("function_call"), raw.get("tool_calls")
    calls = [function] if calls is None and function is not None else _listed(calls, "tool_calls", "bad tool call")
    if role_name in CALL_ROLES and not calls:  # ShareGPT: the turn's value is the call, as JSON text
        calls, content = _listed(content, "the function_call turn", "bad tool call"), None
        if not calls:
            raise UnusableRow("bad tool call", "a function_call turn without a call")
    text, part_reasoning, part_calls = _content(content, role, repairs)
    calls = calls + part_calls
    if reasoning is None:
        reasoning = part_reasoning or None
    if content is None and not calls and reasoning is None:
        raise UnusableRow("no content", f"a {role} turn has none of {', '.join(CONTENT_KEYS)}")

    # 3. The message.
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
    return message


def first_of(record: dict[str, Any], keys: Iterable[str], *empty: Any) -> Any:
    """The value under the first of `keys` that is there and neither null nor one of `empty`; else None."""
    return next((record[key] for key in keys if record.get(key) is not None and record[key] not in empty), None)


def _content(found: Any, role: str, repairs: set[str]) -> tuple[str, str, list[Any]]:
    """Text, reasoning and tool calls of a turn's content: text, a number, or a list of parts."""
    if found is None or isinstance(found, str):
        return found or "", "", []
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
    for item in found:
        part = {"text": item} if isinstance(item, str) else item
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


def _listed(value: Any, what: str, reason: str) -> list[Any]:
    """A list that may come as JSON text, or as its only item; empty where nothing is given."""
    if isinstance(value, str):
        value = _parsed(value, what) if value.strip() else None
    if value is None:
        return []
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise UnusableRow(reason, f"{what} is {shown(value)}, expected a list")
    return value


def tool_call(raw: Any, repairs: set[str]) -> dict[str, Any]:
    """Bring a tool call to OpenAI's shape, its arguments an object (never JSON text, which would be encoded twice)."""
    if not isinstance(raw, dict):
        raise UnusableRow("bad tool call", f"found {shown(raw)}, expected an object")
    function = raw["function"] if isinstance(raw.get("function"), dict) else raw
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise UnusableRow("bad tool call", f"no name in {shown(raw)}")
    arguments = next((function[k] for k in ("arguments", "parameters", "args", "input") if k in function), None)
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"the arguments of {name}") if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise UnusableRow("bad tool call", f"the arguments of {name} are {shown(arguments)}, expected an object")
    call = {"type": "function", "function": {"name": clean(name, repairs), "arguments": deep_clean(arguments, repairs)}}
    if isinstance(raw.get("id"), str):
        call["id"] = clean(raw["id"], repairs)
    return call


def tool_declarations(raw: Any, repairs: set[str]) -> tuple[dict[str, Any], ...]:
    """Tool declarations of a row: a list or its JSON text; bare functions are wrapped as OpenAI has them."""
    out = []
    for item in _listed(raw, "tools", "bad tool declaration"):
        if not isinstance(item, dict):
            raise UnusableRow("bad tool declaration", f"found {shown(item)}, expected an object")
        is_bare = not isinstance(item.get("function"), dict)
        wrapped: dict[str, Any] = {"type": "function", "function": item} if is_bare else item
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


TURN_LISTS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "items")
REPLY_KEYS = ("response", "completion", "output", "answer", "reply")
SYSTEM_KEYS = ("system", "system_prompt")
ID_KEYS = ("id", "row_id", "conversation_id", "prompt_id", "question_id", "task_id", "uuid")
RESERVED = {
    "messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}  # fmt: skip
"""What `apply_chat_template` takes for itself: a row must not bring its own template along."""
CALCULATOR = re.compile(r"<<[^<>]*>>")
"""GSM8K's calculator marks: `<<48/2=24>>24` says 24 twice, and nobody writes that."""


def conversation_of(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `Conversation` that a record gives, whatever its layout, repaired.

    Layouts, the first that fits: a list of turns under one of `TURN_LISTS`; UltraChat's `data` and Spec-Bench's `turns`
    (lists of text); `prompt` (text, turns, or MT-Bench's list of text), `instruction`/`input` or `question`, each with
    a reply under one of `REPLY_KEYS` or alone.

    Raises:
        UnusableRow: no layout fits, or a turn cannot be read.
    """
    repairs: set[str] = set()
    turns, next_turns = _turns(record)
    messages = [turn(item, repairs) for item in turns]
    system = first_of(record, SYSTEM_KEYS, "")
    if isinstance(system, str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": clean(system, repairs)})
    tools = tool_declarations(first_of(record, ("tools", "functions"), ""), repairs)
    options = record.get("chat_template_kwargs")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise UnusableRow("bad template options", f"chat_template_kwargs is {shown(options)}, expected an object")
    taken = sorted(RESERVED & set(options))
    if taken:
        raise UnusableRow("bad template options", f"chat_template_kwargs cannot set {', '.join(taken)}")
    return {
        "messages": tuple(repair(messages, repairs)),
        "tools": tools,
        "template_options": deep_clean({k: v for k, v in options.items() if v is not None}, repairs),
        "next_turns": tuple(clean(text, repairs) for text in next_turns),
        "repairs": tuple(sorted(repairs)),
    }


def _turns(record: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """The turns of a record as they are, never none, and what the user says after each reply still to be written."""
    for key in TURN_LISTS:
        if record.get(key) is not None:
            return _list_of(record[key], key), []
    prompt = record.get("prompt")
    for key, found in (("data", record.get("data")), ("turns", record.get("turns")), ("prompt", prompt)):
        if not isinstance(found, list) or not found:
            continue
        is_text = all(isinstance(item, str) for item in found)
        if is_text and key == "data":
            return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(found)], []
        if is_text:
            return [{"role": "user", "content": found[0]}], found[1:]
        replies = [record[name] for name in REPLY_KEYS if key == "prompt" and isinstance(record.get(name), list)]
        return found + (replies[0] if replies else []), []
    if isinstance(prompt, list):
        raise UnusableRow("no conversation", "prompt is empty")
    reply = next((record[key] for key in REPLY_KEYS if isinstance(record.get(key), str)), None)
    if prompt is not None:
        if "canonical_solution" in record:  # HumanEval: its solution is code, not a chat reply
            reply = None
    elif isinstance(record.get("instruction"), str):
        given = record.get("input")
        prompt = record["instruction"] + (f"\n\n{given}" if isinstance(given, str) and given else "")
    else:
        prompt = record.get("question")
    if prompt is None:
        columns = ", ".join(sorted(map(str, record))[:8])
        hint = "; for text that is rendered already use --mode text" if "text" in record else ""
        raise UnusableRow("no conversation", f"found the columns {columns!a}, expected messages or prompt{hint}")
    answer = [] if reply is None else [{"role": "assistant", "content": CALCULATOR.sub("", reply)}]
    return [{"role": "user", "content": prompt}, *answer], []


def _list_of(found: Any, key: str) -> list[Any]:
    if isinstance(found, str) and found.lstrip().startswith("["):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            raise UnusableRow("no conversation", f"{key} is text that is not JSON: {shown(found)}") from None
    if not isinstance(found, list):
        raise UnusableRow("no conversation", f"{key} is {shown(found)}, expected a list of turns")
    if not found:
        raise UnusableRow("no conversation", f"{key} is empty")
    return found


def repair(messages: list[Message], repairs: set[str]) -> list[Message]:
    """Put turns into an order that chat templates take, noting each repair.

    - Replies and tool results before the first user turn are dropped (ShareGPT's splits begin in mid-conversation).
    - Neighbouring turns of one speaker are merged with an empty line between them; tool results are not (parallel
      calls), nor is a reply behind a tool call.
    - An empty reply (no text, reasoning or call) ends the conversation, which is then a prompt.

    Raises:
        UnusableRow: there is no user turn.

    Example:
        user a, user b, assistant c gives user "a\\n\\nb", assistant c; assistant x, user a, assistant b drops x.
    """
    out: list[Message] = []
    seen_user = False
    for message in messages:
        role = message["role"]
        if role == "user":
            seen_user = True
        elif role != "system" and not seen_user:
            repairs.add("turns before the first user turn dropped")
            continue
        said = message["content"].strip() or message.get("reasoning_content") or message.get("tool_calls")
        if role == "assistant" and not said:
            repairs.add("cut at an empty reply")
            break
        last = out[-1] if out else None
        if last is not None and last["role"] == role and role != "tool" and "tool_calls" not in last:
            repairs.add(f"neighbouring {role} turns merged")
            out[-1] = _merged(last, message)
        else:
            out.append(message)
    if not seen_user:
        raise UnusableRow("no user turn", "nobody asks anything")
    return out


def _merged(first: Message, second: Message) -> Message:
    merged = {**first, **second}
    for key in ("content", "reasoning_content"):
        parts = [message[key] for message in (first, second) if message.get(key)]
        if parts or key == "content":
            merged[key] = "\n\n".join(parts)
    return merged


def given_id(record: dict[str, Any]) -> str | None:
    """The row's own id, if it has a usable one: text or an integer, made safe for file names and one-line messages."""
    for key in ID_KEYS:
        value = record.get(key)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            continue
        return re.sub(r"[^\w.:#@+=/-]", "_", str(value), flags=re.ASCII)[:80]
    return None


def ready_tokens(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `TokenRow` that a record with `input_ids` gives, checked.

    Raises:
        UnusableRow: lengths differ, a value is no id or no 0/1, or a tail that is supervised or as long as the row.
    """
    ids = _integers(record["input_ids"], "input_ids")
    if "loss_mask" not in record:
        raise UnusableRow("bad token row", "input_ids without loss_mask")
    mask = _integers(record["loss_mask"], "loss_mask")
    tail, follows = record.get("tail_length") or 0, record.get("next_is_supervised") or False
    odd = next((value for value in mask if value not in (0, 1)), None)
    problem = None
    if not ids:
        problem = "input_ids is empty"
    elif len(ids) != len(mask):
        problem = f"{len(ids)} input_ids, but {len(mask)} values in loss_mask"
    elif odd is not None:
        problem = f"loss_mask holds {odd}, expected 0 and 1 only"
    elif type(tail) is not int or not 0 <= tail < len(ids):
        problem = f"tail_length is {shown(tail)}, expected 0 to {len(ids) - 1}"
    elif tail and any(mask[-tail:]):
        problem = f"the last {tail} tokens are a tail, but loss_mask is 1 there"
    elif tail and not mask[-tail - 1]:
        problem = f"the last {tail} tokens are a tail, but no reply ends before them"
    elif not isinstance(follows, bool):
        problem = f"next_is_supervised is {shown(follows)}, expected true or false"
    elif follows and (tail or not mask[-1]):
        problem = "next_is_supervised, but the row does not end inside a reply"
    if problem is not None:
        raise UnusableRow("bad token row", problem)
    return {"input_ids": ids, "loss_mask": mask, "next_is_supervised": follows, "tail_length": tail}


def _integers(values: Any, what: str) -> list[int]:
    if not isinstance(values, list):
        raise UnusableRow("bad token row", f"{what} is {shown(values)}, expected a list of integers")
    odd = [value for value in values if type(value) is not int and type(value) is not bool]
    if odd:
        raise UnusableRow("bad token row", f"{what} holds {shown(odd[0])}, expected integers")
    return [int(value) for value in values]
