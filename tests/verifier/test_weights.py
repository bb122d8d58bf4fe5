"""The norm, head and embedding read from files equal the model's own, for every family."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.errors import VerifierError
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.weights import TensorFiles, VerifierHead, fingerprint, load_embedding, load_head
from tests import fakes

FAMILIES = [*fakes.TEXT_FAMILIES, *fakes.WRAPPERS]


def rewrite(folder, change):
    """Change the tensors of a single-file verifier."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path, {"format": "pt"})


def own_logits_and_states(folder, ids):
    """The model's own logits and its state before the final norm, by Transformers alone."""
    verifier = TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cpu")
    kept = {}
    norm = verifier.decoder.norm
    handle = norm.register_forward_pre_hook(lambda module, given: kept.update(state=given[0]))
    with torch.no_grad():
        output = verifier.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    handle.remove()
    return output, kept["state"][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_equal_the_verifiers_own_logits(tmp_path, family):
    folder = fakes.tiny_verifier(tmp_path, family)
    ids = fakes.random_row("r", 60, 5, 260, 1).input_ids
    output, last_states = own_logits_and_states(folder, ids)
    verifier_config = load_verifier_config(str(folder), False)
    head = load_head(verifier_config)
    logits = head.logits(head.normed(last_states))
    assert logits.shape == output.logits[0].shape
    assert (logits - output.logits[0]).abs().max() <= 1e-5 * output.logits[0].abs().max()
    embedding = load_embedding(verifier_config)[ids].float()
    assert torch.allclose(embedding, output.hidden_states[0][0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("tied", [True, False])
def test_F01_single_file_shards_and_tied_heads_all_load(tmp_path, family, tied):
    model = fakes.tiny_model(family, tie_word_embeddings=tied)
    expected_head = model.get_output_embeddings().weight
    expected_embedding = model.get_input_embeddings().weight
    one = fakes.tiny_verifier(tmp_path / "one", family, tie_word_embeddings=tied)
    many = fakes.tiny_verifier(tmp_path / "many", family, tie_word_embeddings=tied, max_shard_size="60KB")
    assert not (one / "model.safetensors.index.json").exists()
    assert len(list(many.glob("*.safetensors"))) >= 3
    for folder in (one, many):
        verifier_config = load_verifier_config(str(folder), False)
        assert torch.equal(load_head(verifier_config).weight, expected_head)
        assert torch.equal(load_embedding(verifier_config) / verifier_config.embedding_scale, expected_embedding)


def test_F01_pytorch_files_load_and_other_formats_are_refused(tmp_path):
    folder = fakes.tiny_verifier(tmp_path, "llama")
    expected = load_head(load_verifier_config(str(folder), False)).weight
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(load_head(load_verifier_config(str(folder), False)).weight, expected)
    (folder / "pytorch_model.bin").rename(folder / "model.h5")
    with pytest.raises(VerifierError, match=r"no weights .*found .h5 files"):
        load_head(load_verifier_config(str(folder), False))


def test_F01_a_missing_shard_and_a_damaged_file_are_named(tmp_path):
    folder = fakes.tiny_verifier(tmp_path / "a", "llama", max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"]["model.norm.weight"]
    shard.unlink()
    with pytest.raises(VerifierError, match=f"{shard.name} is missing"):
        load_head(load_verifier_config(str(folder), False))
    folder = fakes.tiny_verifier(tmp_path / "b", "llama")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(VerifierError, match=r"model\.safetensors: cannot be read"):
        load_head(load_verifier_config(str(folder), False))


@pytest.mark.parametrize(
    "name", ["backbone.embeddings.weight", "transformer.wte.weight", "model.language_model.embed_tokens.weight"]
)
def test_F03_known_aliases_of_the_embedding_are_found(tmp_path, name):
    folder = fakes.tiny_verifier(tmp_path, "llama")
    expected = load_embedding(load_verifier_config(str(folder), False))
    rewrite(folder, lambda tensors: {name if "embed" in key else key: t for key, t in tensors.items()})
    verifier_config = load_verifier_config(str(folder), False)
    assert torch.equal(load_embedding(verifier_config), expected)
    assert torch.equal(load_head(verifier_config).weight, expected)


def test_F03_an_unknown_name_lists_close_ones_and_can_be_given(tmp_path):
    folder = fakes.tiny_verifier(tmp_path, "llama")
    expected = load_embedding(load_verifier_config(str(folder), False))
    rewrite(folder, lambda tensors: {"a.odd_embed.w" if "embed" in key else key: t for key, t in tensors.items()})
    verifier_config = load_verifier_config(str(folder), False)
    with pytest.raises(VerifierError, match=r"close ones: a.odd_embed.w.*embedding=NAME"):
        load_embedding(verifier_config)
    named = load_verifier_config(str(folder), False, ["embedding=a.odd_embed.w"])
    assert torch.equal(load_embedding(named), expected)
    with pytest.raises(VerifierError, match="no tensor named b"):
        load_embedding(load_verifier_config(str(folder), False, ["embedding=b"]))


def test_an_untied_verifier_without_a_head_is_refused(tmp_path):
    folder = fakes.tiny_verifier(tmp_path, "llama", tie_word_embeddings=True)
    fakes.edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(VerifierError, match="for the head and its configuration says that the head is not tied"):
        load_head(load_verifier_config(str(folder), False))


def untied(tmp_path):
    return fakes.tiny_verifier(tmp_path, "llama", tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("suffix", "name"), [("weight_packed", "compressed-tensors"), ("qweight", "GPTQ"), ("weight_blocks", "MXFP4")]
)
def test_F05_a_packed_head_is_refused_by_the_name_of_its_format(tmp_path, suffix, name):
    folder = untied(tmp_path)

    def pack(tensors):
        weight = tensors.pop("lm_head.weight")
        packed = torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32)
        return {**tensors, f"lm_head.{suffix}": packed, "lm_head.weight_scale": torch.ones(weight.shape[0], 1)}

    rewrite(folder, pack)
    with pytest.raises(VerifierError, match=rf"lm_head.{suffix} is quantised \({name}"):
        load_head(load_verifier_config(str(folder), False))


def test_F05_bytes_under_a_plain_name_are_never_read_as_floats(tmp_path):
    folder = untied(tmp_path)
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": torch.zeros(272, 64, dtype=torch.uint8)})
    with pytest.raises(VerifierError, match="stored as uint8"):
        load_head(load_verifier_config(str(folder), False))


def test_F05_an_fp8_body_with_a_bf16_head_works(tmp_path):
    folder = untied(tmp_path)
    head = load_file(folder / "model.safetensors")["lm_head.weight"].bfloat16()

    def quantise(tensors):
        body = {key: t.to(torch.float8_e4m3fn) for key, t in tensors.items() if "_proj" in key}
        scales = {key + "_scale": torch.ones(1) for key in body}
        return {**tensors, **body, **scales, "lm_head.weight": head}

    rewrite(folder, quantise)
    fakes.edit_config(folder, quantization_config={"quant_method": "fp8"})
    assert torch.equal(load_head(load_verifier_config(str(folder), False)).weight, head)


@pytest.mark.parametrize("scale_shape", [(), (272, 1), (272,), (3, 1)], ids=["tensor", "row", "flat row", "block"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_an_eight_bit_head_is_dequantised(tmp_path, scale_shape, dtype):
    folder = untied(tmp_path)
    exact = load_file(folder / "model.safetensors")["lm_head.weight"]
    high = 127.0 if dtype == torch.int8 else 448.0
    if scale_shape == (3, 1):  # blocks of 128 rows by 128 columns, as DeepSeek's
        scale = torch.stack([exact[start : start + 128].abs().max() / high for start in (0, 128, 256)])[:, None]
        spread = scale.repeat_interleave(128, 0)[:272]
    else:
        whole = exact.abs().max() / high
        per_row = exact.abs().amax(1, keepdim=True) / high
        spread = whole if scale_shape == () else per_row
        scale = spread.reshape(scale_shape)
    quantised = exact / spread
    quantised = (quantised.round() if dtype == torch.int8 else quantised).to(dtype)
    name = "lm_head.weight_scale_inv" if scale_shape == (3, 1) else "lm_head.weight_scale"
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": quantised, name: scale})
    head = load_head(load_verifier_config(str(folder), False)).weight
    assert (head - exact).abs().max() <= 0.04 * exact.abs().max()


def test_F09_the_embedding_is_what_the_first_layer_sees_scale_included(tmp_path):
    folder = fakes.tiny_verifier(tmp_path, "gemma3_text")
    verifier_config = load_verifier_config(str(folder), False)
    assert verifier_config.embedding_scale == 8.0
    verifier = TransformersVerifier(verifier_config, "float32", "cpu")
    (first_layer_input, _), *_ = verifier.states([[5, 6, 7]], (0,))
    assert torch.allclose(load_embedding(verifier_config)[[5, 6, 7]], first_layer_input, rtol=1e-6)
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert not torch.allclose(stored[[5, 6, 7]], first_layer_input, rtol=1e-2)


def test_the_vocabulary_padded_beyond_the_tokenizer_is_kept(tmp_path):
    folder = fakes.tiny_verifier(tmp_path, "qwen3", vocab_size=320)
    assert load_head(load_verifier_config(str(folder), False)).weight.shape == (320, 64)
    fakes.edit_config(folder, vocab_size=512)
    with pytest.raises(VerifierError, match=r"shape \[320, 64\], expected \[512, 64\]"):
        load_head(load_verifier_config(str(folder), False))


def test_a_restricted_head_gives_the_same_logits_for_its_tokens():
    generator = torch.Generator().manual_seed(0)
    head = VerifierHead(
        norm_weight=torch.ones(8),
        norm_eps=1e-6,
        weight=torch.randn(20, 8, generator=generator),
        logit_scale=0.5,
        logit_softcap=3.0,
    )
    states = torch.randn(4, 8, generator=generator)
    ids = torch.tensor([2, 5, 19])
    whole = head.logits(head.normed(states))
    assert torch.allclose(head.restricted(ids).logits(head.normed(states)), whole[:, ids], rtol=1e-6)


def test_the_norm_is_computed_in_float32_for_half_precision_and_in_float64_for_float64():
    head = VerifierHead(
        norm_weight=torch.full((4,), 2.0), norm_eps=1e-6, weight=torch.eye(4), logit_scale=1.0, logit_softcap=None
    )
    half = head.to("cpu", torch.bfloat16)
    assert half.norm_weight.dtype == torch.float32
    assert half.normed(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    double = head.to("cpu", torch.float64)
    assert double.normed(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64


def test_the_fingerprint_survives_a_copy_and_notices_other_weights(tmp_path):
    a = fakes.tiny_verifier(tmp_path / "a", "llama", seed=1)
    b = fakes.tiny_verifier(tmp_path / "b", "llama", seed=1)
    c = fakes.tiny_verifier(tmp_path / "c", "llama", seed=2)
    prints = [fingerprint(load_verifier_config(str(folder), False)) for folder in (a, b, c)]
    assert prints[0] == prints[1] != prints[2]


def write_gguf(folder, quantisation):
    """A tiny Qwen3 as a GGUF file beside its config.json and tokenizer; returns the tensors it was made from."""
    gguf = pytest.importorskip("gguf")
    fakes.tiny_verifier(folder, "qwen3", tie_word_embeddings=False, num_layers=2)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    writer = gguf.GGUFWriter(folder / "model-q8_0.gguf", "qwen3")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(272)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    for name, tensor in tensors.items():
        theirs = names.get_name(name, (".weight",)) + (".weight" if name.endswith(".weight") else "")
        theirs = theirs.replace(".weight.weight", ".weight")
        values = tensor.numpy()
        kind = quantisation if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_files_norm_head_and_embedding_are_read_dequantised(tmp_path):
    gguf = pytest.importorskip("gguf")
    tensors = write_gguf(tmp_path, gguf.GGMLQuantizationType.Q8_0)
    verifier_config = load_verifier_config(str(tmp_path), False)
    head = load_head(verifier_config)
    assert torch.equal(head.norm_weight, tensors["model.norm.weight"])
    for mine, exact in (
        (head.weight, tensors["lm_head.weight"]),
        (load_embedding(verifier_config), tensors["model.embed_tokens.weight"]),
    ):
        assert mine.shape == exact.shape
        assert (mine - exact).abs().max() <= 0.01 * exact.abs().max()


def test_a_gguf_verifiers_states_and_targets_are_those_of_its_dequantised_model(tmp_path):
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_gguf(tmp_path, gguf.GGMLQuantizationType.Q8_0)
    verifier_config = load_verifier_config(str(tmp_path), False)
    verifier = TransformersVerifier(verifier_config, "float32", "cpu")
    verifier.check_head(load_head(verifier_config), list(range(3, 40)))


def test_of_several_gguf_files_none_is_guessed(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text(json.dumps(fakes.tiny_config("qwen3").to_dict()))
    verifier_config = load_verifier_config(str(tmp_path), False)
    with pytest.raises(VerifierError, match="2 GGUF files"):
        load_head(verifier_config)
    (tmp_path / "b.gguf").unlink()
    with pytest.raises(VerifierError, match=r"a\.gguf: cannot be read"):
        load_head(verifier_config)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytorch_model.bin", b""),
        ("pytorch_model.bin", b"nonsense"),
        ("pytorch_model.bin", b"\x80\x04}q\x00."),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 5}}'),
        ("model.safetensors.index.json", b"[]"),
    ],
)
def test_files_that_are_no_weights_are_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(VerifierError, match=r"cannot be read|not a weight index") as caught:
        TensorFiles.open(str(tmp_path))
    assert "\n" not in str(caught.value)
