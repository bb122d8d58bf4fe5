"""On-policy answers from served verifiers, for `peagle regenerate --endpoint`.

Prompts go as the token ids that the model's own template gave, or, with `--chat`, as chats that the server renders and
reports. Answers come back as ids either way: nothing is tokenized twice, and reasoning, tool calls and end tokens stay
as the verifier wrote them, whatever the server's parsers make of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

from peagle.config import ServerSettings
from peagle.data.records import Conversation
from peagle.errors import EndpointError
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.source import Generation, GenerationSettings, Prompt, RowAnswer, RowRefused, first_difference
from peagle.vllm.client import REFUSALS_THAT_STOP, Endpoint, EndpointPool, RowRefusedError, in_parallel

logger = logging.getLogger(__name__)


class EndpointAnswers:
    """An `AnswerSource` over one or several servers of the same verifier.

    Args:
        verifier: the model that is meant.
        generation: how answers are written.
        servers: where they are and how they are asked.
        is_chat: send chats, which the server renders with its own template, rather than token ids.

    Raises:
        EndpointError: unreachable, not ready, another model, or a server that returns no token ids.
    """

    def __init__(
        self, verifier: VerifierConfig, generation: GenerationSettings, servers: ServerSettings, is_chat: bool
    ) -> None:
        self._generation, self._servers, self._is_chat = generation, servers, is_chat
        self.endpoints = [Endpoint(url, servers) for url in servers.endpoint]
        self._pool = EndpointPool(self.endpoints, servers)
        try:
            limits = []
            for endpoint in self.endpoints:
                served = endpoint.model()
                endpoint.require_model(verifier.name_or_path, served)
                limits.append(served.max_model_len or verifier.max_position_embeddings)
        except BaseException:
            self.close()
            raise
        self.max_tokens = min(limits)
        """The servers' limit of prompt and answer together."""

    def answers(self, prompts: Sequence[Prompt], wanted: AbstractSet[str]) -> Iterator[RowAnswer | RowRefused]:
        """See `AnswerSource.answers`."""
        jobs = (functools.partial(self._answer, prompt) for prompt in prompts if prompt.row_id in wanted)
        refused_in_a_row = 0
        for result in in_parallel(jobs, self._servers.concurrency, self._pool.close):
            refused_in_a_row = refused_in_a_row + 1 if isinstance(result, RowRefused) else 0
            if isinstance(result, RowRefused) and refused_in_a_row >= REFUSALS_THAT_STOP:
                raise EndpointError(f"{result.row_id}: {result.detail}; {REFUSALS_THAT_STOP} in a row, stopped")
            yield result

    def compare_template(self, conversation: Conversation, prompt_ids: list[int]) -> None:
        """Warn where a server renders a conversation, which ends with a user's turn, otherwise than to `prompt_ids`."""
        for endpoint in self.endpoints:
            theirs = endpoint.chat_ids(_chat(conversation))
            if theirs is None:
                logger.debug("%s: does not say how it renders a chat", endpoint.root_url)
            elif theirs != prompt_ids:
                where = f"from token {first_difference(theirs, prompt_ids)} on"
                logger.warning(
                    "%s renders %s otherwise than the template in use here (%s): those who chat with it send other "
                    "prompts. Answer with the server's template (--chat-template FILE), or serve with this one",
                    endpoint.root_url, conversation.row_id, where,
                )  # fmt: skip

    def close(self) -> None:
        """Drop connections."""
        self._pool.close()

    def _answer(self, prompt: Prompt) -> RowAnswer | RowRefused:
        settings = self._generation
        count = min(settings.max_new_tokens, self.max_tokens - len(prompt.input_ids))
        rendered: list[int] | None = None
        try:
            if self._is_chat:
                assert prompt.conversation is not None, "a chat needs its conversation"
                chat = _chat(prompt.conversation)
                if "tools" in chat:
                    # "auto", the servers' default, is refused where no tool parser was set up, and bends answers where
                    # one was. The template shows the tools all the same.
                    chat["tool_choice"] = "none"
                completion = self._complete(chat, count, prompt.seed, stops=True)
                rendered = completion.prompt_ids
            else:
                completion = self._complete({"prompt": prompt.input_ids}, count, prompt.seed, stops=True)
            context = [*(rendered or prompt.input_ids), *completion.ids]
            tail_ids: list[int] = []
            tail_length = min(settings.tail_tokens, self.max_tokens - len(context))
            if tail_length > 0:
                tail_ids = self._complete({"prompt": context}, tail_length, prompt.seed + 1, stops=False).ids
        except RowRefusedError as error:
            return RowRefused(prompt.row_id, "refused by the server", str(error))
        return RowAnswer(prompt.row_id, Generation(completion.ids, completion.reason, tail_ids), rendered)

    def _complete(self, request: dict[str, Any], max_tokens: int, seed: int, *, stops: bool) -> _Completion:
        """Generated ids, the end token included, and why they ended; for a chat ("messages") or ids ("prompt")."""
        # 1. the request
        settings, is_chat = self._generation, "messages" in request
        payload: dict[str, Any] = {
            **request,
            "max_tokens": max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p if settings.temperature > 0 else 1.0,
            # What the model's generation_config.json would otherwise add.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # Our own end tokens and no others, so that every backend ends at the same place.
            "ignore_eos": True,
            "stop_token_ids": list(settings.eos_ids) if stops else [],
            "return_token_ids": True,
        }
        if settings.temperature > 0:
            payload["seed"] = seed
        # 2. its answer, unless the server broke it off
        for _ in range(self._servers.max_retries + 1):
            answer = self._pool.post("/v1/chat/completions" if is_chat else "/v1/completions", payload)
            try:
                choice = answer.body["choices"][0]
                ids, reason = choice["token_ids"], str(choice["finish_reason"])
            except (KeyError, IndexError, TypeError):
                ids, reason = None, ""
            if reason in ("abort", "error"):  # a server that stops, or drops a request: a part is no answer
                continue
            prompt_ids = answer.body.get("prompt_token_ids") if is_chat else []
            if not isinstance(ids, list) or not ids or not isinstance(prompt_ids, list):
                raise EndpointError(f"{answer.url}: its answers hold no token ids; peagle needs vLLM 0.10.2 or newer")
            # "tool_calls" is what a tool parser calls an end; any other reason is a cut.
            ended: Literal["stop", "length"] = "stop" if reason in ("stop", "tool_calls") else "length"
            return _Completion([int(i) for i in ids], ended, [int(i) for i in prompt_ids])
        raise EndpointError(
            f"{answer.url}: ended one answer early {self._servers.max_retries + 1} times; see the server's log"
        )


@dataclass(frozen=True)
class _Completion:
    """What came back for one request."""

    ids: list[int]
    reason: Literal["stop", "length"]
    prompt_ids: list[int]
    """Of a chat, what the server rendered."""


def _chat(conversation: Conversation) -> dict[str, Any]:
    """A conversation as a chat server takes it."""
    chat: dict[str, Any] = {"messages": list(conversation.messages)}
    if conversation.tools:
        chat["tools"] = list(conversation.tools)
    if conversation.template_options:
        chat["chat_template_kwargs"] = conversation.template_options
    return chat
