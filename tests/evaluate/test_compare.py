import torch

from peagle.engine import Engine, Request, Sampling
from peagle.evaluate.compare import LogitGap, TransformersBaseline, compare, differences, next_logits
from tests.engine.helpers import random_drafter
from tests.fakes import tiny_model

GREEDY = Sampling(temperature=0.0, top_p=1.0)
PROMPTS = [[5, 6, 7], [8] * 9, [4], [20, 21], [9, 3, 3, 7]]


def test_three_decoders_give_the_same_answers_and_each_is_timed():
    model = tiny_model("qwen3", num_hidden_layers=4)
    requests = [Request(prompt, 6 + i) for i, prompt in enumerate(PROMPTS)]
    drafting = Engine(model, random_drafter(model), 4, [2], GREEDY, 2)
    plain = Engine(model, None, 0, [2], GREEDY, 2)
    run = compare(drafting, plain, TransformersBaseline(model, [2], GREEDY), requests, 2)
    assert [answer.ids for answer in run.answers] == run.own_ids
    assert [answer.ids for answer in plain.generate(requests)] == run.own_ids
    assert [len(ids) for ids in run.own_ids] == [6, 7, 8, 9, 10]
    assert list(run.tokens_per_s) == ["drafter", "engine", "transformers"]
    assert min(run.tokens_per_s.values()) > 0
    assert run.laps.num_steps > 0
    assert min(run.laps.draft_s, run.laps.verify_s) > 0
    assert differences(model, requests, [answer.ids for answer in run.answers], run.own_ids) == []


def test_a_models_generation_defaults_do_not_reach_the_baseline():
    model = tiny_model("qwen3", num_hidden_layers=3)
    wanted = Engine(model, None, 0, [2], GREEDY, 1).generate([Request(PROMPTS[0], 12)])[0].ids
    model.generation_config.repetition_penalty = 1.7
    model.generation_config.do_sample = True
    model.generation_config.top_k = 20
    kept = model.generation_config
    assert TransformersBaseline(model, [2], GREEDY).generate([Request(PROMPTS[0], 12)])[0] == wanted
    assert model.generation_config is kept


def test_the_baseline_stops_at_the_end_token_and_at_each_limit():
    model = tiny_model("qwen3", num_hidden_layers=3)
    whole = TransformersBaseline(model, [], GREEDY).generate([Request(PROMPTS[0], 12)])[0]
    eos = whole[3]
    place = whole.index(eos)
    found = TransformersBaseline(model, [eos], GREEDY).generate([Request(PROMPTS[0], 12), Request(PROMPTS[0], 2)])
    assert found == [whole[: place + 1], whole[: min(2, place + 1)]]


def test_a_sampled_baseline_samples():
    model = tiny_model("qwen3", num_hidden_layers=3)
    torch.manual_seed(0)
    hot = TransformersBaseline(model, [2], Sampling(temperature=5.0, top_p=1.0))
    found = hot.generate([Request(PROMPTS[0], 12)] * 3)
    assert len({tuple(ids) for ids in found}) == 3


def test_a_changed_answer_is_found_with_its_logit_gap():
    model = tiny_model("qwen3", num_hidden_layers=3)
    request = Request(PROMPTS[0], 6)
    own = TransformersBaseline(model, [], GREEDY).generate([request])[0]
    changed = [*own[:4], (own[4] + 1) % 259, own[5]]
    ((found),) = differences(model, [request], [changed], [own])
    logits = next_logits(model, [*PROMPTS[0], *own[:4]])
    assert (found.position, found.token, found.own_token) == (4, changed[4], own[4])
    assert found.gap.value == float(logits[own[4]] - logits[changed[4]])
    assert not found.gap.is_tie
    assert not found.gap.is_within_rounding
    (shorter,) = differences(model, [request], [own[:3]], [own])
    assert (shorter.position, shorter.token) == (3, -1)
    assert not shorter.gap.is_within_rounding


def test_only_half_precision_is_allowed_its_rounding():
    assert LogitGap(5e-5, 20.0, torch.float32).is_tie
    assert not LogitGap(0.1, 20.0, torch.float32).is_within_rounding
    assert LogitGap(0.1, 20.0, torch.bfloat16).is_within_rounding
    assert not LogitGap(0.1, 20.0, torch.bfloat16).is_tie
    assert not LogitGap(3.0, 20.0, torch.bfloat16).is_within_rounding
