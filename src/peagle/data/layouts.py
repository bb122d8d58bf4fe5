"""Which layout a record has, and the repairs that bring its turns into an order that chat templates take."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from peagle.data.conversation import Message, UnusableRow
from peagle.data.turns import clean, deep_clean, shown, tool_declarations, turn

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


@dataclass
class Draft:
    """A conversation while it is being put together."""

    messages: list[Message] = field(default_factory=list)
    tools: tuple[dict[str, Any], ...] = ()
    template_options: dict[str, Any] = field(default_factory=dict)
    next_turns: list[str] = field(default_factory=list)
    repairs: set[str] = field(default_factory=set)


def conversation_of(record: dict[str, Any]) -> Draft:
    """Read the conversation of a record, whatever its layout, and mend it.

    Layouts, the first that fits: a list of turns under one of `TURN_LISTS`; UltraChat's `data` and Spec-Bench's `turns`
    (lists of text); `prompt` (text, turns, or MT-Bench's list of text), `instruction`/`input` or `question`, each with
    a reply under one of `REPLY_KEYS` or alone.

    Raises:
        UnusableRow: no layout fits, or a turn cannot be read.
    """
    draft = Draft()
    raw = _turns(record, draft)
    for item in raw:
        message, repairs = turn(item)
        draft.messages.append(message)
        draft.repairs |= repairs
    system = next((record[key] for key in SYSTEM_KEYS if record.get(key) not in (None, "")), None)
    if isinstance(system, str) and not (draft.messages and draft.messages[0]["role"] == "system"):
        draft.messages.insert(0, {"role": "system", "content": clean(system, draft.repairs)})
    declared = next((record[key] for key in ("tools", "functions") if record.get(key) not in (None, "")), None)
    draft.tools = tool_declarations(declared, draft.repairs)
    options = record.get("chat_template_kwargs")
    if options is not None:
        if not isinstance(options, dict):
            raise UnusableRow("bad template options", f"chat_template_kwargs is {shown(options)}, expected an object")
        taken = sorted(RESERVED & set(options))
        if taken:
            raise UnusableRow("bad template options", f"chat_template_kwargs cannot set {', '.join(taken)}")
        draft.template_options = deep_clean({k: v for k, v in options.items() if v is not None}, draft.repairs)
    draft.messages = mend(draft.messages, draft.repairs)
    return draft


def _turns(record: dict[str, Any], draft: Draft) -> list[Any]:
    for key in TURN_LISTS:
        if record.get(key) is not None:
            return _list_of(record[key], key)
    for key in ("data", "turns"):
        found = record.get(key)
        if isinstance(found, list) and found:
            if all(isinstance(text, str) for text in found):
                if key == "turns":
                    return _prompts(found, draft)
                roles = ("user", "assistant")
                return [{"role": roles[i % 2], "content": text} for i, text in enumerate(found)]
            return found
    if record.get("prompt") is not None:
        prompt = record["prompt"]
        if isinstance(prompt, list) and prompt and all(isinstance(text, str) for text in prompt):
            return _prompts(prompt, draft)
        if isinstance(prompt, list):
            reply: list[Any] = next((record[key] for key in REPLY_KEYS if isinstance(record.get(key), list)), [])
            return [*_list_of(prompt, "prompt"), *reply]
        if "canonical_solution" in record:  # HumanEval: its solution is code, not a chat reply
            return [{"role": "user", "content": prompt}]
        return _exchange(prompt, record)
    if isinstance(record.get("instruction"), str):
        given = record.get("input")
        text = record["instruction"] + (f"\n\n{given}" if isinstance(given, str) and given else "")
        return _exchange(text, record)
    if record.get("question") is not None:
        return _exchange(record["question"], record)
    found_keys = ", ".join(sorted(map(str, record))[:8])
    hint = "; for text that is rendered already use --mode text" if "text" in record else ""
    raise UnusableRow("no conversation", f"found the columns {found_keys!a}, expected messages or prompt{hint}")


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


def _prompts(texts: list[str], draft: Draft) -> list[Any]:
    draft.next_turns = [clean(text, draft.repairs) for text in texts[1:]]
    return [{"role": "user", "content": texts[0]}]


def _exchange(prompt: Any, record: dict[str, Any]) -> list[Any]:
    reply = next((record[key] for key in REPLY_KEYS if isinstance(record.get(key), str)), None)
    turns = [{"role": "user", "content": prompt}]
    if reply is not None:
        turns.append({"role": "assistant", "content": CALCULATOR.sub("", reply)})
    return turns


def mend(messages: list[Message], repairs: set[str]) -> list[Message]:
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
        if role == "assistant" and is_empty(message):
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


def is_empty(message: Message) -> bool:
    """Whether a reply says, thinks and calls nothing."""
    return not message["content"].strip() and not message.get("reasoning_content") and not message.get("tool_calls")


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
