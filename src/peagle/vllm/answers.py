"""On-policy answers from served verifiers, for `peagle regenerate --endpoint`.

Prompts go as the token ids that the model's own template gave, or, if asked, as chats that the server renders and says
how. Answers come back as ids either way: nothing is tokenized twice, and reasoning, tool calls and end tokens stay as
the verifier wrote them, whatever the server's parsers make of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

from peagle.data import Conversation
from peagle.errors import EndpointError
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.source import Generation, GenerationSettings, Prompt, RowAnswer, RowRefused
from peagle.vllm.client import Endpoint, EndpointPool, RetryPolicy, RowRefusedError, in_parallel, is_same_model

logger = logging.getLogger(__name__)

REFUSALS_THAT_STOP = 20
"""Prompts in a row that the server refused."""


@dataclass(frozen=True)
class AnswerEndpoints:
    """Where answers come from, and how insistently."""

    urls: tuple[str, ...]
    api_key: str | None
    model: str | None
    """Name under which the verifier is served, if not its own; None: its own."""
    concurrency: int
    policy: RetryPolicy
    is_chat: bool = False
    """Send chats, which the server renders with its own template, rather than token ids."""


class EndpointAnswers:
    """An `AnswerSource` over one or several servers of the same verifier.

    Args:
        verifier_config: the verifier.
        generation: how answers are written.
        endpoints: see `AnswerEndpoints`.

    Raises:
        EndpointError: unreachable, not ready, another model, or a server that returns no token ids.
    """

    def __init__(
        self, verifier_config: VerifierConfig, generation: GenerationSettings, endpoints: AnswerEndpoints
    ) -> None:
        self._generation, self._concurrency = generation, endpoints.concurrency
        self._max_retries, self._is_chat = endpoints.policy.max_retries, endpoints.is_chat
        made = [Endpoint(url, endpoints.api_key, endpoints.policy, endpoints.concurrency) for url in endpoints.urls]
        self._pool = EndpointPool(made, endpoints.policy)
        try:
            limits = []
            for endpoint in made:
                served = endpoint.model(endpoints.model)
                if endpoints.model is None and not is_same_model(
                    verifier_config.name_or_path, (served.name, served.root)
                ):
                    raise EndpointError(
                        f"{endpoint.root_url}: serves {served.root}, not {verifier_config.name_or_path}; if these are the same "
                        f"weights, say so with --served-model-name {served.name}"
                    )
                limits.append(served.max_model_len or verifier_config.max_position_embeddings)
        except BaseException:
            self.close()
            raise
        self._max_tokens = min(limits)

    @property
    def max_tokens(self) -> int:
        """The servers' limit of prompt and answer together."""
        return self._max_tokens

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The servers."""
        return self._pool.endpoints

    def answers(self, prompts: Sequence[Prompt], wanted: AbstractSet[str]) -> Iterator[RowAnswer | RowRefused]:
        """See `AnswerSource.answers`."""
        jobs = (functools.partial(self._answer, prompt) for prompt in prompts if prompt.row_id in wanted)
        refused_in_a_row = 0
        for result in in_parallel(jobs, self._concurrency, self._pool.close):
            refused_in_a_row = refused_in_a_row + 1 if isinstance(result, RowRefused) else 0
            if isinstance(result, RowRefused) and refused_in_a_row >= REFUSALS_THAT_STOP:
                raise EndpointError(f"{result.row_id}: {result.detail}; {REFUSALS_THAT_STOP} in a row, stopped")
            yield result

    def compare_template(self, conversation: Conversation, prompt_ids: list[int]) -> None:
        """Warn where a server would render a conversation otherwise: those who chat with it send other prompts.

        Args:
            conversation: ends with a user's turn.
            prompt_ids: what the template in use here makes of it.
        """
        for endpoint in self.endpoints:
            found = endpoint.chat_ids(_chat(conversation))
            if found is None:
                logger.debug("%s: does not tell how it renders a chat", endpoint.root_url)
            elif found != prompt_ids:
                place = next((i for i, (a, b) in enumerate(zip(found, prompt_ids)) if a != b), None)
                where = f"from token {place} on" if place is not None else f"{len(found)} tokens, not {len(prompt_ids)}"
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
        count = min(settings.max_new_tokens, self._max_tokens - len(prompt.input_ids))
        rendered: list[int] | None = None
        try:
            if self._is_chat:
                assert prompt.conversation is not None, "a chat is asked for by its conversation"
                chat = _chat(prompt.conversation)
                if "tools" in chat:
                    # "auto", the servers' default, is refused where no tool parser was set up, and bends answers where
                    # one was. The template shows the tools all the same.
                    chat["tool_choice"] = "none"
                said = self._ask(chat, count, prompt.seed, True)
                rendered = said.prompt_ids
            else:
                said = self._ask({"prompt": prompt.input_ids}, count, prompt.seed, True)
            ids, context = said.ids, rendered or prompt.input_ids
            tail: list[int] = []
            room = min(settings.tail_tokens, self._max_tokens - len(context) - len(ids))
            if room > 0:
                tail = self._ask({"prompt": [*context, *ids]}, room, prompt.seed + 1, False).ids
        except RowRefusedError as error:
            return RowRefused(prompt.row_id, "refused by the server", str(error))
        return RowAnswer(prompt.row_id, Generation(ids, said.reason, tail), rendered)

    def _ask(self, asked: dict[str, Any], max_tokens: int, seed: int, stops: bool) -> _Said:
        """Generated ids, the end token included, and why they ended; for a chat ("messages") or ids ("prompt")."""
        settings, is_chat = self._generation, "messages" in asked
        payload: dict[str, Any] = {
            **asked,
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
        for _ in range(self._max_retries + 1):
            answer = self._pool.post("/v1/chat/completions" if is_chat else "/v1/completions", payload)
            try:
                choice = answer.body["choices"][0]
                found, reason = choice["token_ids"], str(choice["finish_reason"])
            except (KeyError, IndexError, TypeError):
                found, reason = None, ""
            if reason in ("abort", "error"):  # a server that stops, or drops a request: a part is no answer
                self._pool.count_retry()
                continue
            prompt_ids = answer.body.get("prompt_token_ids") if is_chat else []
            if not isinstance(found, list) or not found or not isinstance(prompt_ids, list):
                raise EndpointError(f"{answer.url}: its answers hold no token ids; peagle needs vLLM 0.10.2 or newer")
            # "tool_calls" is what a tool parser calls an end of its own kind; any other reason is a cut.
            ended: Literal["stop", "length"] = "stop" if reason in ("stop", "tool_calls") else "length"
            return _Said([int(i) for i in found], ended, [int(i) for i in prompt_ids])
        raise EndpointError(f"{answer.url}: ended one answer early {self._max_retries + 1} times; see the server's log")


@dataclass(frozen=True)
class _Said:
    """What came back for one request."""

    ids: list[int]
    reason: Literal["stop", "length"]
    prompt_ids: list[int]
    """Of a chat, what the server rendered."""


def _chat(conversation: Conversation) -> dict[str, Any]:
    """A conversation as a chat server takes it."""
    asked: dict[str, Any] = {"messages": list(conversation.messages)}
    if conversation.tools:
        asked["tools"] = list(conversation.tools)
    if conversation.template_options:
        asked["chat_template_kwargs"] = conversation.template_options
    return asked
