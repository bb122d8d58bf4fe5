"""The tensors that vLLM loads for a drafter: names, shapes, dtypes, values."""

import difflib
from collections import Counter

import torch

from peagle.drafter.checkpoint import vocabulary_fault
from peagle.serve.config_rules import ServedShape
from peagle.serve.files import Findings, RawCheckpoint

_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CHUNK_ROWS = 8192
_HALF_MARGIN = 8
_NOT_LOADED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")


def expected_shapes(shape: ServedShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that must be there."""
    hidden, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    kv, mlp = shape.num_kv_heads * shape.head_dim, shape.intermediate_size
    fc_in = shape.num_aux * shape.target_hidden_size
    found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, fc_in), "norm.weight": (hidden,)}
    if shape.norm_before_fc:
        found["input_norm.weight"] = (fc_in,)
    if shape.fc_norm:
        found |= {f"fc_norm.{i}.weight": (shape.target_hidden_size,) for i in range(shape.num_aux)}
    for i in range(shape.num_layers):
        width = 2 * hidden if i == 0 else hidden
        layer = f"layers.{i}"
        if i == 0:
            found[f"{layer}.hidden_norm.weight"] = (hidden,)
        found |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (heads, width),
            f"{layer}.self_attn.k_proj.weight": (kv, width),
            f"{layer}.self_attn.v_proj.weight": (kv, width),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (mlp, hidden),
            f"{layer}.mlp.up_proj.weight": (mlp, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, mlp),
        }
        if shape.layer_type == "qwen3":
            found |= {f"{layer}.self_attn.{name}_norm.weight": (shape.head_dim,) for name in ("q", "k")}
        if shape.attention_bias:
            found |= {f"{layer}.self_attn.{n}_proj.bias": (size,) for n, size in (("q", heads), ("k", kv), ("v", kv))}
            if shape.layer_type == "llama":
                found[f"{layer}.self_attn.o_proj.bias"] = (hidden,)
    return found


def check_tensors(raw: RawCheckpoint, shape: ServedShape, findings: Findings) -> None:
    """Compare the files with what the config makes vLLM expect, then look at the values."""
    # 1. Names and shapes.
    expected = expected_shapes(shape)
    optional = {
        "embed_tokens.weight": (shape.vocab_size, shape.hidden_size),
        "lm_head.weight": (shape.draft_vocab_size, shape.hidden_size),
        "t2d": (shape.vocab_size,),
        "d2t": (shape.draft_vocab_size,),
    }
    for name, size in (expected | optional).items():
        found = raw.tensors[name].shape if name in raw.tensors else None
        if found is None and name in expected:
            near = difflib.get_close_matches(name, set(raw.tensors) - set(expected), n=1, cutoff=0.8)
            hint = f"; is it {near[0]}?" if near else ""
            findings.error(name, f"missing: vLLM would serve it uninitialized or refuse to load{hint}")
        elif found is not None and found != size:
            why = ""
            if name == "fc.weight" and found[:1] == size[:1]:
                why = f"; vLLM takes {shape.num_aux} verifier layers of {shape.target_hidden_size} from the config"
            findings.error(name, f"is {list(found)}, the config makes it {list(size)}{why}")
    if shape.kind == "peagle":
        _check_mask_hidden(raw, shape, findings)
    if "lm_head.weight" not in raw.tensors:
        why = "a head of another vocabulary cannot be shared with the verifier"
        if not shape.is_pruned:
            why = "vLLM would take the verifier's, whatever was trained; `peagle evaluate` refuses the checkpoint"
        findings.error("lm_head.weight", f"missing: {why}")
    if shape.is_pruned and "d2t" in raw.tensors and "t2d" not in raw.tensors:
        findings.error("t2d", "missing: which tokens can be drafted; `peagle evaluate` refuses the checkpoint")
    if "embed_tokens.weight" not in raw.tensors:
        findings.note("embed_tokens.weight", "absent: vLLM shares the verifier's embedding")
        if shape.kind == "peagle":
            text = "absent: P-EAGLE trains its embedding, and the mask token's row with it"
            findings.warning("embed_tokens.weight", text)
    known = {*expected, *optional, *_NOT_LOADED, "mask_hidden"}
    for name in sorted(set(raw.tensors) - known):
        file = raw.tensors[name].file.name
        findings.error(name, f"unknown tensor in {file}: vLLM stops at names that it has no place for")
    # 2. What they hold.
    _check_dtypes(raw, shape, findings)
    _check_values(raw, findings)
    _check_half_range(raw, shape, findings)
    check_vocabulary(raw, shape, findings)


def _check_mask_hidden(raw: RawCheckpoint, shape: ServedShape, findings: Findings) -> None:
    name, size = "mask_hidden", shape.num_aux * shape.target_hidden_size
    if name not in raw.tensors:
        findings.error(name, "missing: vLLM refuses a P-EAGLE drafter without the state of its mask slots")
        return
    found = raw.tensors[name].shape
    if torch.Size(found).numel() != size:
        findings.error(name, f"is {list(found)}, expected [1, 1, {size}]: raw verifier states, before fc")
    elif not bool(raw.read(name).any()):
        findings.warning(name, "is all zeros; was it trained?")


def _check_dtypes(raw: RawCheckpoint, shape: ServedShape, findings: Findings) -> None:
    types: Counter[str] = Counter()
    for name, info in raw.tensors.items():
        if name in ("d2t", "t2d"):
            continue
        if not info.is_float:
            findings.error(name, f"is {info.dtype}; drafter weights are float32, float16 or bfloat16")
        else:
            types[_DTYPE_NAMES[info.dtype]] += 1
    if len(types) > 1:
        common, _ = types.most_common(1)[0]
        odd = sorted(n for n, i in raw.tensors.items() if i.is_float and _DTYPE_NAMES[i.dtype] != common)
        findings.error(odd[0], f"tensors are of several dtypes ({', '.join(sorted(types))}); write all in one")
    elif types and shape.dtype not in types:
        findings.error("config.json", f"dtype is {shape.dtype or 'missing'}, the tensors are {', '.join(types)}")


def _check_values(raw: RawCheckpoint, findings: Findings) -> None:
    for name, info in sorted(raw.tensors.items()):
        if not info.is_float:
            continue
        finite, largest = True, 0.0
        for part in raw.chunks(name, _CHUNK_ROWS):
            low, high = torch.aminmax(part.float())
            finite = finite and bool(torch.isfinite(low)) and bool(torch.isfinite(high))
            largest = max(largest, float(low.abs()), float(high.abs()))
        if not finite:
            findings.error(name, "holds NaN or infinity; go back to an earlier checkpoint")
        elif largest == 0.0 and name != "mask_hidden" and not name.endswith("bias"):
            findings.warning(name, "is all zeros; was it ever trained or copied?")


def _check_half_range(raw: RawCheckpoint, shape: ServedShape, findings: Findings) -> None:
    """Warn where float16 would overflow, though bfloat16 and float32 do not.

    What a projection reads is normed to a mean square of 1 and multiplied by the norm's weight, so its largest output
    is of the size of its largest row, times that weight; inputs that lie along the row reach some times as much.
    """
    largest, where = 0.0, ""
    for i in range(shape.num_layers):
        norms = ["input_layernorm", "hidden_norm"] if i == 0 else ["input_layernorm"]
        read_by = {f"self_attn.{name}_proj": norms for name in ("q", "k", "v")}
        read_by |= {f"mlp.{name}_proj": ["post_attention_layernorm"] for name in ("gate", "up")}
        for projection, before in read_by.items():
            name, scales = f"layers.{i}.{projection}.weight", [f"layers.{i}.{norm}.weight" for norm in before]
            if not {name, *scales} <= set(raw.tensors):
                continue
            scale = torch.cat([raw.read(one).float() for one in scales])
            for part in raw.chunks(name, _CHUNK_ROWS):
                if part.shape[-1] != len(scale):
                    break  # reported already
                size = float((part.float() * scale).norm(dim=1).max())
                largest, where = max((largest, where), (size, name))
    if largest > torch.finfo(torch.float16).max / _HALF_MARGIN:
        findings.warning(
            where,
            f"its outputs reach about {largest:.0e}, beyond float16 (65504): served with --dtype float16 the drafter "
            "would draft nothing that is accepted; bfloat16 and float32 hold them",
        )


def check_vocabulary(raw: RawCheckpoint, shape: ServedShape, findings: Findings) -> None:
    """The map of a pruned vocabulary: verifier id = draft id + d2t[draft id]."""
    if "d2t" not in raw.tensors:
        if shape.is_pruned:
            text = f"missing: the draft vocabulary has {shape.draft_vocab_size} of {shape.vocab_size} tokens, and vLLM "
            findings.error("d2t", text + "would take draft ids for verifier ids without a word")
        return
    info = raw.tensors["d2t"]
    if info.dtype not in ("I64", "I32") or info.shape != (shape.draft_vocab_size,):
        findings.error("d2t", f"is {info.dtype} {list(info.shape)}, expected int64 [{shape.draft_vocab_size}]")
        return
    if not shape.is_pruned:
        if bool(raw.read("d2t").any()):
            findings.error("d2t", "is not zero, but the vocabulary is not pruned: vLLM does not apply it")
        return
    # One that is missing or of another shape is reported already.
    has_t2d = "t2d" in raw.tensors and raw.tensors["t2d"].shape == (shape.vocab_size,)
    if fault := vocabulary_fault(raw.read("d2t"), raw.read("t2d") if has_t2d else None, shape.vocab_size):
        findings.error(*fault)
