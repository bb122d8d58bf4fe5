import pytest

from peagle.errors import CheckpointError
from peagle.evaluate.prompts import check_pair, token_difference
from peagle.verifier.model_config import load_verifier_config
from tests.engine.helpers import random_drafter
from tests.fakes import tiny_model, tiny_verifier, word_tokenizer


def test_E12_a_drafter_for_another_vocabulary_size_is_refused(tmp_path):
    verifier_config = load_verifier_config(str(tiny_verifier(tmp_path, vocab_size=160, num_layers=3)), False)
    drafter = random_drafter(tiny_model("qwen3", vocab_size=128, num_hidden_layers=3), verifier=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"vocabulary 128, .* has 160"):
        check_pair(drafter.config, verifier_config, word_tokenizer(160))


def test_E12_two_swapped_tokens_are_refused(tmp_path):
    folders = []
    for name in ("trained", "used"):
        tokenizer = word_tokenizer(128)
        folder = tiny_verifier(tmp_path / name, vocab_size=128, num_layers=3, tokenizer=tokenizer)
        folders.append(folder)
    path = folders[1] / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"w7": 7', '"w8": 7', 1).replace('"w8": 8', '"w7": 8', 1))
    assert path.read_text() != text
    verifier_config = load_verifier_config(str(folders[1]), False)
    from peagle.verifier.special_tokens import load_tokenizer

    drafter = random_drafter(tiny_model("qwen3", vocab_size=128, num_hidden_layers=3), verifier=str(folders[0]))
    with pytest.raises(CheckpointError, match="id 7 is 'w7' and 'w8'"):
        check_pair(drafter.config, verifier_config, load_tokenizer(str(folders[1]), False))


def test_a_verifier_that_moved_is_warned_about_and_its_own_folder_is_silent(tmp_path):
    folder = tiny_verifier(tmp_path, vocab_size=128, num_layers=3, tokenizer=word_tokenizer(128))
    verifier_config = load_verifier_config(str(folder), False)
    model = tiny_model("qwen3", vocab_size=128, num_hidden_layers=3)
    moved = random_drafter(model, verifier=str(tmp_path / "gone")).config
    assert "not compared" in check_pair(moved, verifier_config, word_tokenizer(128))
    assert check_pair(random_drafter(model, verifier=str(folder)).config, verifier_config, word_tokenizer(128)) is None
    wide = random_drafter(model, verifier=str(folder), aux_layer_ids=(1, 2, 7)).config
    with pytest.raises(CheckpointError, match="reads layer 7"):
        check_pair(wide, verifier_config, word_tokenizer(128))


def test_a_longer_vocabulary_is_a_difference():
    assert token_difference(word_tokenizer(5), word_tokenizer(5)) is None
    assert token_difference(word_tokenizer(5), word_tokenizer(6)) == "id 5 is None and 'w5'"
