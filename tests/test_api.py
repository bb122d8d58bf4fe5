"""`peagle.load` and `peagle.read` give what the packages give."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import peagle
from peagle.errors import PeagleError
from tests.fakes import byte_tokenizer, tiny_verifier
from tests.flow.test_readme import run  # noqa: F401  (a fixture)


@pytest.fixture
def model(run):  # noqa: F811
    return peagle.load(run / "checkpoints" / "checkpoint_best", device="cpu")


def test_importing_peagle_loads_no_torch():
    code = "import sys, peagle; print('torch' in sys.modules, sorted(peagle.__all__))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[0] == "False"
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = peagle.laod


def test_a_model_writes_the_verifiers_own_text(model):
    prompts = ["2 + 2?", "5 + 5?"]
    written = model.write(prompts, max_new_tokens=12, batch_size=2)
    for prompt, one in zip(prompts, written):
        turns = [{"role": "user", "content": prompt}]
        ids = model.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        own = model.verifier.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
        assert one.answer.ids == own.tolist()
    assert model.write("2 + 2?", max_new_tokens=12, num_speculative_tokens=2)[0].answer.ids == written[0].answer.ids


def test_a_layout_depends_on_seed_and_row_alone(model, run):  # noqa: F811
    both = peagle.read(run / "hidden_states", num_rows=2)
    second = peagle.read(run / "hidden_states", num_rows=1, start=1)
    alone, packed = model.lay_out(second), model.lay_out(both)
    offset = int((both.document_ids == 0).sum())
    inside = packed.anchor_pos >= offset
    assert torch.equal(packed.anchor_pos[inside] - offset, alone.anchor_pos)
    assert torch.equal(packed.depth[inside], alone.depth)


def test_a_step_trains_all_but_the_head(model, run):  # noqa: F811
    batch = peagle.read(run / "hidden_states", num_rows=2)
    result = model.train_step(batch, model.lay_out(batch))
    assert (result.loss_sum[result.total > 0] > 0).all()
    without = [name for name, parameter in model.drafter.named_parameters() if parameter.grad is None]
    assert without == ["lm_head.weight"]


def test_another_verifier_than_the_drafters_is_refused(run, tmp_path):  # noqa: F811
    other = tiny_verifier(tmp_path / "other", "llama", tokenizer=byte_tokenizer(), hidden_size=32)
    model = peagle.load(run / "checkpoints" / "checkpoint_best", verifier=str(other), device="cpu")
    with pytest.raises(PeagleError, match="made for a verifier of"):
        model.write("2 + 2?", max_new_tokens=4)
