"""Lossless speculative decoding, and plain decoding as its honest baseline: rows are admitted, stepped and released."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from peagle.config import Sampling
from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.engine.acceptance import accept, common_prefix, pick, probabilities
from peagle.engine.drafting import Drafting, FusedDrafter
from peagle.engine.verifier_pass import VerifierPass, cache_obstacle
from peagle.errors import ConfigError
from peagle.verifier.local import refuse_damaged_logits


@dataclass(frozen=True)
class Request:
    """One prompt."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int | None = None
    """Of this prompt's draws; None: made from the engine's seed and the prompt's place among the requests."""


@dataclass(frozen=True)
class Pass:
    """One verifier pass over a draft."""

    num_known: int
    """Tokens known before it: the prompt and what was generated so far."""
    draft_ids: tuple[int, ...]
    num_accepted: int
    """Accepted by the verifier, before an end-of-sequence token or the limit cut them."""


@dataclass(frozen=True)
class Answer:
    """What a prompt got."""

    ids: list[int]
    """Generated tokens; an end-of-sequence token is included."""
    finish_reason: Literal["stop", "length"]
    """"stop": an end-of-sequence token."""
    passes: list[Pass]
    """Passes with a draft, in order; the prefill is none."""


@dataclass
class Laps:
    """Time spent on each part of the steps, filled as the engine decodes; measuring makes a GPU wait at every part."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    """Verifier pass, acceptance and cache work."""
    num_steps: int = 0


@dataclass
class _Row:
    index: int
    request: Request
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"

    @property
    def num_known(self) -> int:
        return len(self.request.prompt_ids) + len(self.ids)


class Engine:
    """Decodes prompts with a verifier and, if there is one, a drafter.

    Greedy answers are the verifier's own, sampled ones have its distribution, whatever the drafter proposes. Batches
    are continuous: a finished row's place goes to the next prompt at once, and rows advance each at its own pace.

    Args:
        model: a causal language model of Transformers (sdpa or eager attention).
        drafter: trained for it; None: see `plain`.
        num_speculative_tokens: K, drafted per pass; 0 without a drafter.
        batch_size: rows decoded side by side.

    Raises:
        ConfigError: drafter, verifier and K do not fit together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter | None,
        num_speculative_tokens: int,
        eos_token_ids: Sequence[int],
        sampling: Sampling,
        batch_size: int,
    ) -> None:
        if (drafter is None) != (num_speculative_tokens == 0):
            raise ConfigError("--num-speculative-tokens must be at least 1 with a drafter, and 0 without one")
        self.model, self.depth = model.eval(), num_speculative_tokens
        self.sampling, self.batch_size = sampling, batch_size
        self.eos = frozenset(eos_token_ids)
        config = model.config.get_text_config()
        if drafter is not None:
            misfit = verifier_misfit(drafter.config, config.vocab_size, config.hidden_size, config.num_hidden_layers)
            if misfit is not None:
                raise ConfigError(misfit)
            drafter.eval()
        self.layers = None if drafter is None else FusedDrafter(drafter)

    @classmethod
    def plain(cls, model: PreTrainedModel, eos_token_ids: Sequence[int], sampling: Sampling, batch_size: int) -> Engine:
        """Decodes without a drafter, a token per pass."""
        return cls(
            model=model,
            drafter=None,
            num_speculative_tokens=0,
            eos_token_ids=eos_token_ids,
            sampling=sampling,
            batch_size=batch_size,
        )

    def generate(self, requests: Sequence[Request], laps: Laps | None = None) -> list[Answer]:
        """Decode all prompts.

        Args:
            requests: prompts of at least one token, limits of at least one.
            laps: where to add the time of each part; None measures nothing.

        Returns:
            Answers in the order of the requests.

        Raises:
            VerifierError: the verifier's logits are NaN or infinite, or there is a drafter and the verifier's cache
                cannot be rolled back.
        """
        answers = dict(self.stream(requests, laps))
        return [answers[index] for index in range(len(requests))]

    @torch.inference_mode()
    def stream(self, requests: Sequence[Request], laps: Laps | None = None) -> Iterator[tuple[int, Answer]]:
        """Decode all prompts, see `generate`. Nothing else may run the model until the last answer is taken.

        Yields:
            (index of a request, its answer), as answers end.
        """
        if requests:
            yield from _Run(self, requests, laps).answers()


class _Run:
    """One call of `stream`: the caches, and the rows in them. Rows 0 .. len(rows) - 1 of the caches are in use."""

    def __init__(self, engine: Engine, requests: Sequence[Request], laps: Laps | None) -> None:
        self.engine, self.laps = engine, laps
        self.depth, self.sampling, self.device = engine.depth, engine.sampling, engine.model.device
        # Rows of several lengths stand side by side only where a token's place in the cache can be chosen.
        config = engine.model.config.get_text_config()
        self.num_rows = min(engine.batch_size, len(requests)) if cache_obstacle(config) is None else 1
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        # A last draft may run past the limit; mask slots of a ragged batch as far again.
        capacity = longest + 2 * self.depth + 2
        aux_layer_ids = None if engine.layers is None else engine.layers.drafter.config.aux_layer_ids
        self.verifier = VerifierPass(engine.model, aux_layer_ids, self.num_rows, capacity, self.depth + 1)
        self.drafting = None
        if engine.layers is not None:
            self.drafting = Drafting(
                layers=engine.layers,
                num_speculative_tokens=self.depth,
                sampling=self.sampling,
                vocab_size=config.vocab_size,
                num_rows=self.num_rows,
                capacity=capacity,
            )
        self.waiting = deque(enumerate(requests))
        self.rows: list[_Row] = []
        self.finished: list[_Row] = []
        self.pending = torch.empty(0, self.depth + 1, dtype=torch.int64, device=self.device)
        """Of each row the newest token and its draft, [num_rows, K + 1]."""
        self.probs: Tensor | None = None
        """What the drafts were drawn from, see `Proposal.probs`."""

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """(index, answer), as answers end."""
        with self.verifier.session():
            while self.waiting or self.rows:
                while self.waiting and len(self.rows) < self.num_rows:
                    self._admit(*self.waiting.popleft())
                if self.rows:
                    self._step()
                while self.finished:
                    row = self.finished.pop(0)
                    yield row.index, Answer(row.ids, row.finish_reason, row.passes)

    def _admit(self, index: int, request: Request) -> None:
        """Prefill one prompt in the first free row and draft for it; alone, so that nothing is padded."""
        seed = request.seed
        if seed is None:  # neighbouring seeds and rows do not share a stream
            seed = (self.sampling.seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9 + 1) % (1 << 63)
        row = _Row(index, request, torch.Generator().manual_seed(seed))
        place, count = len(self.rows), len(request.prompt_ids)
        ids = torch.tensor([list(request.prompt_ids)], device=self.device)
        logits, aux = self.verifier.run(ids, self.verifier.ruler.span(place, [0], count), 1)
        refuse_damaged_logits(logits, self.engine.model)
        first = self._choose(logits, [row])
        if self._extend(row, first[0].tolist()):
            self.finished.append(row)
            return
        self.rows.append(row)
        if self.drafting is None or aux is None:
            pending, probs_of_draft = first, None
        else:
            draft = self.drafting.propose(
                first_row=place,
                pair_ids=torch.cat([ids[:, 1:], first], 1),
                aux_states=aux,
                starts=[0],
                counts=[count],
                uniforms=self._uniforms([row], self.depth),
            )
            pending, probs_of_draft = torch.cat([first, draft.ids], 1), draft.probs
        self.pending = pending if place == 0 else torch.cat([self.pending, pending])
        if probs_of_draft is not None:
            self.probs = probs_of_draft if place == 0 or self.probs is None else torch.cat([self.probs, probs_of_draft])

    def _step(self) -> None:
        """Verify every row's draft in one pass, keep what is accepted, draft again for the rows that go on."""
        rows, depth, began_s = self.rows, self.depth, self._now_s()
        starts = [row.num_known - 1 for row in rows]
        logits, aux = self.verifier.run(self.pending, self.verifier.ruler.span(0, starts, depth + 1), depth + 1)
        chosen, chosen_ids, drafted, accepted = self._judge(logits)
        if self.laps is not None:
            self.laps.verify_s += self._now_s() - began_s
            self.laps.num_steps += 1
        going = []
        for place, row in enumerate(rows):
            if depth:
                row.passes.append(Pass(row.num_known, tuple(drafted[place]), accepted[place]))
            if self._extend(row, chosen_ids[place][: accepted[place] + 1]):
                self.finished.append(row)
            else:
                going.append(place)
        if len(going) < len(rows):
            order = self._compact(going, starts)
            if not order:
                return
            at = torch.tensor(order, device=self.device)
            chosen, aux = chosen[at], None if aux is None else aux[at]
            starts, accepted = [starts[place] for place in order], [accepted[place] for place in order]
        counts = [count + 1 for count in accepted]
        longest = max(counts)
        if min(counts) == longest:
            last = chosen[:, longest - 1 : longest]
        else:
            last = chosen.gather(1, torch.tensor(accepted, device=self.device)[:, None])
        if self.drafting is None or aux is None:
            self.pending = last
            return
        began_s = self._now_s()
        draft = self.drafting.propose(
            first_row=0,
            pair_ids=chosen[:, :longest],
            aux_states=aux[:, :longest],
            starts=starts,
            counts=counts,
            uniforms=self._uniforms(self.rows, depth),
        )
        self.pending, self.probs = torch.cat([last, draft.ids], 1), draft.probs
        if self.laps is not None:
            self.laps.draft_s += self._now_s() - began_s

    def _now_s(self) -> float:
        if self.laps is None:
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _judge(self, logits: Tensor) -> tuple[Tensor, list[list[int]], list[list[int]], list[int]]:
        """Apply the acceptance rule; one transfer to the host.

        Returns:
            (tokens that may leave [num_rows, K + 1], the same as lists, drafted ids, accepted per row): of a row's
            tokens the accepted ones and the one after them do leave.
        """
        start = self.depth + 1
        if self.sampling.is_greedy or self.probs is None:
            chosen = self._choose(logits, self.rows)
            lines = torch.cat([self.pending, chosen], 1).tolist()
            accepted = [common_prefix(line[1:start], line[start:]) for line in lines]
        else:
            probs = probabilities(logits, self.sampling.temperature, self.sampling.top_p)
            uniforms = self._uniforms(self.rows, start)
            assert uniforms is not None
            num_accepted, following = accept(self.pending[:, 1:], self.probs, probs, uniforms)
            chosen = torch.cat([self.pending[:, 1:], following[:, None]], 1)
            chosen.scatter_(1, num_accepted[:, None], following[:, None])
            lines = torch.cat([self.pending, chosen, num_accepted[:, None]], 1).tolist()
            accepted = [line.pop() for line in lines]
        return chosen, [line[start:] for line in lines], [line[1:start] for line in lines], accepted

    def _choose(self, logits: Tensor, rows: list[_Row]) -> Tensor:
        """The verifier's own tokens, the most likely ones or drawn ones: [num_rows, num_tokens]."""
        uniforms = self._uniforms(rows, logits.shape[1])
        if uniforms is None:
            return logits.argmax(-1)
        return pick(probabilities(logits, self.sampling.temperature, self.sampling.top_p), uniforms)

    def _extend(self, row: _Row, ids: list[int]) -> bool:
        """Append tokens up to an end-of-sequence token or the limit; True if the answer is finished."""
        eos, limit = self.engine.eos, row.request.max_new_tokens
        for token in ids:
            row.ids.append(token)
            if token in eos:
                row.finish_reason = "stop"
                return True
            if len(row.ids) >= limit:
                return True
        return False

    def _compact(self, going: list[int], starts: list[int]) -> list[int]:
        """Close the gaps: rows from the end move into freed places. Returns, for each place in use, the row it had."""
        order = list(range(len(self.rows)))
        left = set(going)
        for place in range(len(going)):
            if place not in left:
                source = max(left)
                left.remove(source)
                # Verified positions 0 .. start + accepted, the last round's pass included, are all that matters.
                length = starts[source] + self.depth + 1
                self.verifier.cache.key_values.move(source, place, length)
                if self.drafting is not None:
                    self.drafting.move(source, place, starts[source])
                order[place] = source
        order = order[: len(going)]
        self.rows = [self.rows[place] for place in order]
        return order

    def _uniforms(self, rows: list[_Row], count: int) -> Tensor | None:
        """`count` draws per row, each from its row's own stream; None in greedy decoding."""
        if self.sampling.is_greedy:
            return None
        draws = [torch.rand(count, generator=row.generator) for row in rows]
        return torch.stack(draws).to(self.device)


def verifier_misfit(drafter: DrafterConfig, vocab_size: int, hidden_size: int, num_layers: int) -> str | None:
    """Why a drafter cannot draft for a verifier of this shape; None if it can."""
    sizes = (("vocabulary", drafter.vocab_size, vocab_size), ("width", drafter.hidden_size, hidden_size))
    for label, ours, theirs in sizes:
        if ours != theirs:
            return f"the drafter is made for a verifier of {label} {ours}, this one has {theirs}"
    if drafter.aux_layer_ids[-1] > num_layers:
        return f"the drafter reads layer {drafter.aux_layer_ids[-1]}, the verifier has {num_layers} layers"
    return None
