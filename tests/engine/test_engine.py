import random

import pytest
import torch

import peagle.engine.engine as engine_module
from peagle.engine import Engine, Request, Sampling, probabilities
from peagle.errors import ConfigError, VerifierError
from tests.engine.helpers import Oracle, random_drafter
from tests.fakes import TEXT_FAMILIES, WRAPPERS, tiny_model

GREEDY = Sampling()
NO_EOS: list[int] = []


def prompts(count: int, seed: int, vocab_size: int = 259, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def own_answers(model, asked: list[list[int]], limit: int) -> list[list[int]]:
    """Transformers' own greedy ids, one prompt at a time."""
    found = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, pad_token_id=0
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def oracle(monkeypatch, answers: dict, seed: int) -> type[Oracle]:
    monkeypatch.setattr(engine_module, "Drafting", Oracle)
    Oracle.answers, Oracle.rng, Oracle.real = answers, random.Random(seed), []
    return Oracle


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *WRAPPERS])
def test_greedy_ids_are_the_verifiers_own_whatever_the_family_the_batch_and_the_drafter(family: str):
    model = tiny_model(family)
    asked = prompts(4, seed=1)
    wanted = own_answers(model, asked, 16)
    requests = [Request(prompt, 16) for prompt in asked]
    for kind, batch_size in (("peagle", 1), ("peagle", 3), ("eagle3", 3), (None, 1), (None, 3)):
        drafter = None if kind is None else random_drafter(model, kind)
        engine = Engine(model, drafter, 0 if drafter is None else 4, [2], GREEDY, batch_size)
        assert [answer.ids for answer in engine.generate(requests)] == wanted, (kind, batch_size)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_greedy_ids_are_the_verifiers_own_when_drafts_are_accepted_deeply(monkeypatch, family, depth, batch_size):
    model = tiny_model(family)
    asked = prompts(7, seed=2, longest=40)
    wanted = own_answers(model, asked, 40)
    oracle(monkeypatch, {tuple(p): w for p, w in zip(asked, wanted)}, seed=3)
    engine = Engine(model, random_drafter(model, depth=depth), depth, [2], GREEDY, batch_size)
    answers = engine.generate([Request(prompt, 40) for prompt in asked])
    assert [answer.ids for answer in answers] == wanted
    accepted = [round.num_accepted for answer in answers for round in answer.passes]
    assert set(accepted) == set(range(depth + 1))  # every length of prefix happened


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["peagle", "eagle3"])
def test_cached_drafts_equal_drafts_made_from_scratch(monkeypatch, kind: str, batch_size: int):
    """After any mixture of accepted and rejected tokens the drafter's cache holds real pairs only."""
    model = tiny_model("qwen3", num_hidden_layers=4)
    drafter = random_drafter(model, kind, draft_vocab_size=100, norm_before_fc=True)
    asked = prompts(5, seed=4, longest=20)
    wanted = own_answers(model, asked, 25)
    used = oracle(monkeypatch, {tuple(p): w for p, w in zip(asked, wanted)}, seed=5)
    Engine(model, drafter, 4, [2], GREEDY, batch_size).generate([Request(prompt, 25) for prompt in asked])
    firsts = {tuple(p[1:]): p[0] for p in asked}
    assert len(used.real) > 30
    for known, draft in used.real:
        first = next(first for rest, first in firsts.items() if known[: len(rest)] == rest)
        assert draft == scratch_draft(model, drafter, [first, *known], 4)


def scratch_draft(model, drafter, ids: list[int], depth: int) -> list[int]:
    """K tokens after x_0 .. x_n, with no cache and with attention written out from design.md section 3."""
    taken = {}
    layers = model.model.layers
    hook = layers[-1].register_forward_hook(lambda _, __, out: taken.update(last=out[0] if type(out) is tuple else out))
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        hook.remove()
        chosen = [taken["last"] if j == len(layers) else states[j] for j in drafter.config.aux_layer_ids]
        aux = torch.cat(chosen, -1)[0, :-1]
        embeds, hidden = drafter.embed_pairs(torch.tensor(ids[1:]), aux)
        if drafter.config.speculators_model_type == "peagle":
            mask_embeds, mask_hidden = drafter.embed_masks(depth - 1)
            embeds, hidden = torch.cat([embeds, mask_embeds]), torch.cat([hidden, mask_hidden])
            found = drafter.norm(dense(drafter, embeds, hidden))[len(ids) - 2 :]
            return drafter.to_verifier_ids(drafter.logits(found).argmax(-1)).tolist()
        tokens = []
        for _ in range(depth):
            carried = dense(drafter, embeds, hidden)[-1:]
            token = drafter.to_verifier_ids(drafter.logits(drafter.norm(carried)).argmax(-1))
            tokens.append(token.item())
            embeds, hidden = torch.cat([embeds, drafter.embed_tokens(token)]), torch.cat([hidden, carried])
        return tokens


def dense(drafter, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    count = len(embeds)

    def attend(layer, q, k, v):
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    return drafter.carried_pass(drafter.enter(embeds, hidden), torch.arange(count), attend)


def test_an_end_inside_a_draft_ends_the_answer_and_the_pass_counts_as_accepted(monkeypatch):
    model = tiny_model("qwen3")
    prompt = prompts(1, seed=6)[0]
    whole = own_answers(model, [prompt], 20)[0]
    eos = next(token for i, token in enumerate(whole) if i >= 3 and token not in whole[:i])
    place = whole.index(eos)
    used = oracle(monkeypatch, {tuple(prompt): whole}, seed=0)
    monkeypatch.setattr(used, "_line", lambda self, known, depth: whole[len(known) + 1 - len(prompt) :][:depth])
    answer = Engine(model, random_drafter(model), 6, [eos], GREEDY, 1).generate([Request(prompt, 20)])[0]
    assert answer.ids == whole[: place + 1]
    assert answer.finish_reason == "stop"
    # accepted drafted tokens count before the end cuts them
    assert sum(round.num_accepted + 1 for round in answer.passes) + 1 > len(answer.ids)
    assert answer.passes[-1].num_accepted == 6


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
def test_a_limit_inside_a_draft_cuts_the_answer_and_not_the_count(monkeypatch, limit: int):
    model = tiny_model("qwen3")
    prompt = prompts(1, seed=7)[0]
    whole = own_answers(model, [prompt], 30)[0]
    used = oracle(monkeypatch, {tuple(prompt): whole}, seed=0)
    monkeypatch.setattr(used, "_line", lambda self, known, depth: whole[len(known) + 1 - len(prompt) :][:depth])
    answer = Engine(model, random_drafter(model), 4, NO_EOS, GREEDY, 1).generate([Request(prompt, limit)])[0]
    assert answer.ids == whole[:limit]
    assert answer.finish_reason == "length"
    assert [round.num_accepted for round in answer.passes] == [4] * -(-(limit - 1) // 5)
    assert [round.num_known for round in answer.passes] == [len(prompt) + 1 + 5 * i for i in range(len(answer.passes))]


def test_a_first_token_that_ends_the_answer_needs_no_pass():
    model = tiny_model("qwen3")
    prompt = prompts(1, seed=8)[0]
    first = own_answers(model, [prompt], 1)[0][0]
    for batch_size in (1, 2):
        engine = Engine(model, random_drafter(model), 4, [first], GREEDY, batch_size)
        answers = engine.generate([Request(prompt, 9)] * 3)
        assert [(answer.ids, answer.passes, answer.finish_reason) for answer in answers] == [([first], [], "stop")] * 3


def test_answers_come_in_the_order_of_the_requests_and_are_streamed_as_they_end():
    model = tiny_model("qwen3", num_hidden_layers=3)
    asked = prompts(7, seed=9)
    engine = Engine(model, random_drafter(model), 3, NO_EOS, GREEDY, 3)
    requests = [Request(prompt, 1 + 5 * (i % 3)) for i, prompt in enumerate(asked)]
    answers = engine.generate(requests)
    streamed = list(engine.stream(requests))
    assert [index for index, _ in streamed[:2]] == [0, 3]
    assert sorted(index for index, _ in streamed) == list(range(7))
    assert all(answer == answers[index] for index, answer in streamed)
    assert [len(answer.ids) for answer in answers] == [r.max_new_tokens for r in requests]
    assert engine.generate([]) == []


@pytest.mark.parametrize("draft_vocab_size", [8, 5])
@pytest.mark.parametrize("kind", ["peagle", "eagle3"])
def test_sampled_answers_have_the_verifiers_distribution(kind: str, draft_vocab_size: int):
    """Chi-square over the pairs of neighbouring tokens after one prompt; seeded, so it passes always or never."""
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=1)
    model = tiny_model("qwen3", num_hidden_layers=2, hidden_size=32, vocab_size=8, eos_token_id=None)
    drafter = random_drafter(
        model,
        kind,
        draft_vocab_size=draft_vocab_size,
        num_layers=1,
        aux_layer_ids=(0, 1, 2),
        mask_token_id=7 if kind == "peagle" else None,
    )
    prompt, count = [4, 5, 6], 800
    answers = Engine(model, drafter, 2, NO_EOS, sampling, 100).generate([Request(prompt, 3)] * count)
    accepted = sum(round.num_accepted for answer in answers for round in answer.passes)
    assert accepted > count / 10  # the rule was at work
    with torch.inference_mode():
        grid = torch.cartesian_prod(*[torch.arange(8)] * 2)
        lines = torch.cat([torch.tensor(prompt).expand(len(grid), 3), grid], 1)
        probs = probabilities(model(lines).logits[:, 2:], sampling.temperature, sampling.top_p).double()
    first, second = probs[0, 0], probs[::8, 1]
    joint = first[:, None, None] * second[:, :, None] * probs[:, 2].reshape(8, 8, 8)
    ids = torch.tensor([answer.ids for answer in answers])
    for tokens in ((0, 1), (1, 2)):
        expected = joint.sum(3 - sum(tokens)).flatten()
        observed = torch.bincount(ids[:, tokens[0]] * 8 + ids[:, tokens[1]], minlength=64)
        assert observed[expected == 0].sum() == 0
        assert_same_distribution(observed.double(), count * expected)


def assert_same_distribution(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square at a level of 1e-4, cells of fewer than five expected draws taken together."""
    common = expected >= 5
    rest = torch.stack([observed[~common].sum(), expected[~common].sum()])
    statistic = ((observed - expected) ** 2 / expected.clamp(min=1e-9))[common].sum()
    statistic += (rest[0] - rest[1]) ** 2 / rest[1].clamp(min=1e-9)
    freedom = int(common.sum())
    assert freedom > 15
    # Wilson and Hilferty's approximation of the quantile
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_a_sampled_answer_does_not_depend_on_its_batch():
    model = tiny_model("qwen3", num_hidden_layers=3)
    drafter = random_drafter(model)
    requests = [Request(prompt, 12) for prompt in prompts(5, seed=10, longest=20)]
    sampling = Sampling(temperature=1.0, top_p=1.0, seed=3)
    one, many = (Engine(model, drafter, 3, [2], sampling, size).generate(requests) for size in (1, 4))
    assert [answer.ids for answer in one] == [answer.ids for answer in many]
    other = Engine(model, drafter, 3, [2], Sampling(temperature=1.0, seed=4), 1).generate(requests)
    assert [answer.ids for answer in one] != [answer.ids for answer in other]


def test_a_drafter_of_another_verifier_is_refused():
    model = tiny_model("qwen3", num_hidden_layers=3)
    with pytest.raises(ConfigError, match="vocabulary 160"):
        Engine(model, random_drafter(model, vocab_size=160, draft_vocab_size=160), 3, [], GREEDY, 1)
    with pytest.raises(ConfigError, match="reads layer 9"):
        Engine(model, random_drafter(model, aux_layer_ids=(1, 2, 9)), 3, [], GREEDY, 1)
    with pytest.raises(ConfigError, match="num-speculative-tokens"):
        Engine(model, None, 3, [], GREEDY, 1)


def test_a_cache_that_cannot_be_rolled_back_decodes_plainly_and_is_refused_with_a_drafter():
    model = tiny_model("qwen3_next", num_hidden_layers=4)
    assert "linear_attention" in model.config.layer_types
    asked = prompts(3, seed=10, longest=20)
    requests = [Request(prompt, 9) for prompt in asked]
    answers = Engine(model, None, 0, [2], GREEDY, 3).generate(requests)
    assert [answer.ids for answer in answers] == own_answers(model, asked, 9)
    with pytest.raises(VerifierError, match="linear_attention: the engine cannot roll back"):
        Engine(model, random_drafter(model), 2, [], GREEDY, 1).generate(requests)


def test_a_prompts_own_seed_makes_its_answer_wherever_it_stands():
    model = tiny_model("qwen3", num_hidden_layers=2)
    sampling = Sampling(temperature=1.0, seed=5)
    requests = [Request(prompt, 12, seed) for seed, prompt in enumerate(prompts(4, seed=11))]
    answers = Engine(model, None, 0, NO_EOS, sampling, 4).generate(requests)
    backwards = Engine(model, None, 0, NO_EOS, sampling, 2).generate(requests[::-1])
    assert answers == backwards[::-1]
