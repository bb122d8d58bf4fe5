"""A drafter served by vLLM against vLLM without it, against our engine, and against `peagle evaluate --mode replay`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from tests.vllm.support.commands import must
from tests.vllm.support.engines import Engines, greedy_task, speculative

TIE_GAP = 1e-4


@dataclass(frozen=True)
class Decoding:
    """vLLM with a drafter against vLLM without, and against us."""

    answers: int
    identical: int
    """Answers that are the verifier's own, one at a time and eight at a time."""
    num_drafts: int
    accepted: list[int]
    """vLLM's own counters, one prompt at a time: passes, and accepted tokens per position."""
    replay_num_drafts: int
    replay_accepted: list[int]
    """What `peagle evaluate --mode replay` counts on the same answers."""
    our_num_drafts: int
    our_accepted: list[int]
    """What our engine counts when it decodes."""
    drafts_compared: int
    drafts_equal: int
    ties: int
    """Drafts that differ by a logit gap under `TIE_GAP`."""

    @property
    def counts_equal(self) -> bool:
        """Whether vLLM, replay and our engine count the same, up to shown ties."""
        theirs = (self.num_drafts, self.accepted)
        same = theirs == (self.replay_num_drafts, self.replay_accepted) == (self.our_num_drafts, self.our_accepted)
        return same or (self.ties > 0 and self.drafts_equal + self.ties == self.drafts_compared)

    @property
    def draft_tokens_equal(self) -> bool:
        """Whether every draft is the same, up to shown ties."""
        return self.drafts_compared > 0 and self.drafts_equal + self.ties == self.drafts_compared


def compare_decoding(
    engines: Engines,
    verifier: Path,
    checkpoint: Path,
    prompts: Sequence[list[int]],
    max_tokens: int,
    num_speculative_tokens: int,
    work: Path,
) -> Decoding:
    """Decode greedily without the drafter, with it, and with our engine; replay vLLM's answers.

    Args:
        work: folder for the answers and the replay's figures.
    """
    eos = load_verifier_config(str(verifier), False).eos_token_ids
    tasks = [greedy_task(prompts, max_tokens, eos, one) for one in (True, False)]
    plain = engines.generate(verifier, None, [{**task, "tail_tokens": num_speculative_tokens} for task in tasks], False)
    drafted = engines.generate(verifier, speculative(checkpoint, num_speculative_tokens), tasks, True)
    same = [[a == b for a, b in zip(p["answers"], d["answers"])] for p, d in zip(plain, drafted)]
    replayed = replay_counts(verifier, checkpoint, prompts, plain[0], num_speculative_tokens, work)
    ours = our_passes(verifier, checkpoint, prompts, max_tokens, num_speculative_tokens, eos)
    compared = equal = ties = 0
    for prompt, passes, theirs, answer in zip(prompts, ours, drafted[0]["drafts"], drafted[0]["answers"]):
        found = compare_drafts(verifier, checkpoint, [*prompt, *answer], passes, theirs)
        compared, equal, ties = compared + found[0], equal + found[1], ties + found[2]
    return Decoding(
        answers=len(prompts),
        identical=sum(all(ways) for ways in zip(*same)),
        num_drafts=int(drafted[0]["num_drafts"]),
        accepted=[int(n) for n in drafted[0]["accepted"]],
        replay_num_drafts=replayed[0],
        replay_accepted=replayed[1],
        our_num_drafts=sum(len(passes) for passes in ours),
        our_accepted=[sum(one.num_accepted > k for p in ours for one in p) for k in range(num_speculative_tokens)],
        drafts_compared=compared,
        drafts_equal=equal,
        ties=ties,
    )


def replay_counts(
    verifier: Path, checkpoint: Path, prompts: Sequence[list[int]], found: dict[str, Any], depth: int, work: Path
) -> tuple[int, list[int]]:
    """`peagle evaluate --mode replay` on recorded answers: passes, and accepted tokens per position.

    Args:
        found: a task's "answers", and their "tails": what the verifier says past each answer's end, without which the
            last passes could not be judged.
    """
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (prompt, answer, tail) in enumerate(zip(prompts, found["answers"], found["tails"])):
        mask = [0] * len(prompt) + [1] * len(answer) + [0] * len(tail)
        ids = [*prompt, *answer, *tail]
        rows.append({"id": str(number), "input_ids": ids, "loss_mask": mask, "tail_length": len(tail)})
    (work / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    must("evaluate", checkpoint, "--verifier-name-or-path", verifier, "--mode", "replay", "--data",
         work / "answers.jsonl", "--num-speculative-tokens", depth, "--dtype", "float32", "--device", "cpu",
         "--output", work / "replay")  # fmt: skip
    pooled = json.loads((work / "replay" / "evaluation.json").read_text(encoding="utf-8"))["pooled"]
    return pooled["verifier_passes"], pooled["accepted_tokens_per_position"]


def our_passes(
    verifier: Path, checkpoint: Path, prompts: Sequence[list[int]], max_tokens: int, depth: int, eos: Sequence[int]
) -> list[list[Any]]:
    """The verifier passes of our own engine, per prompt."""
    from peagle.drafter.checkpoint import load
    from peagle.engine import Sampling
    from peagle.engine.engine import Engine, Request

    model = TransformersVerifier(load_verifier_config(str(verifier), False), "float32", "cpu").model
    drafter = load(str(checkpoint), torch.float32, torch.device("cpu"))
    engine = Engine(model, drafter, depth, eos, Sampling(temperature=0.0, top_p=1.0, seed=0), 4)
    answers = engine.generate([Request(prompt, max_tokens) for prompt in prompts])
    return [answer.passes for answer in answers]


def compare_drafts(
    verifier: Path, checkpoint: Path, ids: list[int], passes: Sequence[Any], theirs: Sequence[list[int]]
) -> tuple[int, int, int]:
    """Compare the drafts of one answer, pass by pass: (compared, equal, near ties).

    A draft that differs is a tie if our own drafter's logits at the first differing depth are within `TIE_GAP`.
    """
    equal = ties = 0
    for one, other in zip(passes, theirs):
        mine = list(one.draft_ids)
        if mine == other:
            equal += 1
            continue
        first = next(k for k, (a, b) in enumerate(zip(mine, other)) if a != b)
        logits = draft_logits(verifier, checkpoint, ids[: one.num_known], len(mine))[first]
        ties += abs(float(logits[mine[first]] - logits[other[first]])) < TIE_GAP
    missing = abs(len(passes) - min(len(passes), len(theirs)))
    return len(passes) + missing, equal, ties


def draft_logits(verifier: Path, checkpoint: Path, known: list[int], depth: int) -> torch.Tensor:
    """Our drafter's logits for the `depth` tokens after `known`, from scratch, [depth, vocab_size]."""
    from peagle.drafter.checkpoint import load

    drafter = load(str(checkpoint), torch.float32, torch.device("cpu"))
    reader = TransformersVerifier(load_verifier_config(str(verifier), False), "float32", "cpu")
    ((aux, _),) = reader.states([known], drafter.config.aux_layer_ids)
    count = len(known) - 1
    with torch.inference_mode():
        embeds, hidden = drafter.embed_pairs(torch.tensor(known[1:]), aux[:count])
        mask_embeds, mask_hidden = drafter.embed_masks(depth - 1)
        embeds, hidden = torch.cat([embeds, mask_embeds]), torch.cat([hidden, mask_hidden])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1).flatten(1)

        entered = drafter.enter(embeds, hidden)
        states = drafter.norm(drafter.carried_pass(entered, torch.arange(count + depth - 1), attend))
        logits = drafter.logits(states[count - 1 :])
    full = torch.full((depth, drafter.config.vocab_size), float("-inf"))
    full[:, drafter.to_verifier_ids(torch.arange(logits.shape[1]))] = logits
    return full


def question_prompts(verifier: Path, file: Path, count: int) -> list[list[int]]:
    """Questions as the verifier's own template renders them."""
    from peagle.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(verifier), False)
    prompts = []
    for line in file.read_text(encoding="utf-8").splitlines()[:count]:
        messages = [{"role": "user", "content": json.loads(line)["question"]}]
        prompts.append(list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)))
    return prompts
