"""Hidden states through Transformers: the right layer, the right row, before the norm."""

import json

import pytest
import torch

from peagle.errors import VerifierError
from peagle.verifier.local import TransformersVerifier, group_by_length, resolve_device, resolve_dtype
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.weights import load_head
from tests import fakes

LENGTHS = (5, 60, 17, 33, 9, 48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fakes.tiny_verifier(tmp_path_factory.mktemp("verifier"), "qwen3", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def verifier(folder):
    return TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cpu")


@pytest.fixture(scope="module")
def rows():
    return [fakes.random_row(f"row-{n}", n, 2, 260, n).input_ids for n in LENGTHS]


def own_states(verifier, ids):
    with torch.no_grad():
        return verifier.model(input_ids=torch.tensor([ids]), output_hidden_states=True)


def test_layer_id_j_is_transformers_hidden_states_j(verifier, rows):
    for ids, (aux, _) in zip(rows, verifier.states(rows, (0, 2, 4, 7))):
        hidden = own_states(verifier, ids).hidden_states
        for slice_, j in zip(aux.split(64, dim=-1), (0, 2, 4, 7)):
            assert torch.allclose(slice_, hidden[j][0], rtol=1e-4, atol=1e-5)


def test_last_states_are_before_the_norm_and_transformers_last_entry_is_after_it(verifier, rows):
    _, last = verifier.states([rows[0]], (2, 4, 5))[0]
    after = own_states(verifier, rows[0]).hidden_states[-1][0]
    assert torch.allclose(verifier.decoder.norm(last), after, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(last, after, rtol=0.1)


def test_H02_states_belong_to_their_row_whatever_the_batch_and_its_order(verifier, rows):
    alone = [verifier.states([ids], (2, 4, 5))[0] for ids in rows]
    order = [4, 0, 5, 2, 1, 3]
    together = verifier.states(rows, (2, 4, 5))
    shuffled = verifier.states([rows[i] for i in order], (2, 4, 5))
    for i in range(len(rows)):
        for other in (together[i], shuffled[order.index(i)]):
            for mine, theirs in zip(alone[i], other):
                assert mine.shape == theirs.shape
                cosine = torch.nn.functional.cosine_similarity(mine, theirs, dim=-1)
                assert cosine.min() >= 0.99999


def test_H13_the_last_layer_may_be_asked_for_and_is_the_state_before_the_norm(verifier, rows):
    three, last = verifier.states([rows[1]], (2, 4, 5))[0]
    four, _ = verifier.states([rows[1]], (2, 4, 5, 8))[0]
    assert (three.shape[1], four.shape[1]) == (3 * 64, 4 * 64)
    assert torch.equal(four[:, :192], three)
    assert torch.equal(four[:, 192:], last)


@pytest.mark.parametrize("family", fakes.WRAPPERS)
def test_of_a_multimodal_wrapper_the_text_models_states_are_taken(tmp_path, family):
    wrapped = TransformersVerifier(
        load_verifier_config(str(fakes.tiny_verifier(tmp_path, family)), False), "float32", "cpu"
    )
    ids = fakes.random_row("r", 20, 2, 260, 3).input_ids
    aux, _ = wrapped.states([ids], (2, 4, 5))[0]
    hidden = own_states(wrapped, ids).hidden_states
    expected = torch.cat([hidden[j][0] for j in (2, 4, 5)], dim=-1)
    assert torch.allclose(aux, expected, rtol=1e-4, atol=1e-5)


def test_H16_the_norm_is_applied_exactly_once(folder, verifier, rows):
    head = load_head(verifier.verifier_config)
    own = own_states(verifier, rows[1]).logits[0].log_softmax(-1)
    _, last = verifier.states([rows[1]], (2, 4, 5))[0]

    def divergence(normed):
        mine = head.logits(normed).log_softmax(-1)
        return (own.exp() * (own - mine)).sum(-1).max().item()

    assert divergence(head.normed(last)) < 1e-6
    assert divergence(head.normed(head.normed(last))) > 1e-3
    assert divergence(last) > 1e-3


@pytest.mark.parametrize(
    "wrong", [{"norm_adds_one": True}, {"logit_scale": 0.5}, {"logit_softcap": 5.0}, {"rms_norm_eps": 0.5}]
)
def test_H16_a_family_that_peagle_reads_wrongly_is_refused_before_extraction(verifier, rows, wrong):
    import dataclasses

    verifier.check_head(load_head(verifier.verifier_config), rows[1])
    with pytest.raises(VerifierError, match="does not know how the qwen3 family computes them"):
        verifier.check_head(load_head(dataclasses.replace(verifier.verifier_config, **wrong)), rows[1])


def test_states_come_in_the_verifiers_dtype(tmp_path):
    verifier_config = load_verifier_config(str(fakes.tiny_verifier(tmp_path, "llama", dtype="bfloat16")), False)
    own = TransformersVerifier(verifier_config, "auto", "cpu")
    assert {states.dtype for states in own.states([[3, 4, 5]], (2, 4, 5))[0]} == {torch.bfloat16}
    own.check_head(load_head(verifier_config), [3, 4, 5, 6, 7, 8])
    assert TransformersVerifier(verifier_config, "float32", "cpu").states([[3, 4]], (2,))[0][0].dtype == torch.float32


def test_choices_are_the_models_own_argmax(verifier, rows):
    positions = [1, 7, 16]
    (passed,) = verifier.run([rows[2]], (2, 4, 5), [positions])
    assert passed.choice_ids == own_states(verifier, rows[2]).logits[0, positions].argmax(-1).tolist()


def test_no_hook_stays_behind(verifier, rows):
    def num_hooks():
        return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in verifier.layers)

    before = num_hooks()
    verifier.states(rows[:1], (0, 2, 8))
    assert num_hooks() == before


def test_groups_are_of_like_length_bounded_and_a_function_of_the_lengths():
    assert group_by_length([5, 90, 7, 80], 2) == [[1, 3], [2, 0]]
    long = group_by_length([60_000, 10_000, 10, 9], 8)
    assert long == [[0], [1, 2, 3]]


def test_missing_weights_are_refused_not_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = fakes.tiny_verifier(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.3.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(VerifierError, match=r"lack 1 of the model's tensors .*layers.3.mlp.up_proj"):
        TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cpu")


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fakes.tiny_config("llama").to_dict()))
    with pytest.raises(VerifierError, match="no weights") as caught:
        TransformersVerifier(load_verifier_config(str(tmp_path), False), "float32", "cpu")
    assert "\n" not in str(caught.value)


def test_devices_and_dtypes_are_checked(verifier):
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(VerifierError, match="--device nowhere"):
        resolve_device("nowhere")
    if not torch.cuda.is_available():
        with pytest.raises(VerifierError, match="torch sees no GPU here"):
            resolve_device("cuda:3")
    with pytest.raises(VerifierError, match="--dtype int7"):
        resolve_dtype(verifier.verifier_config, "int7")
