"""The verifier's final norm, head and embedding, read from its files tensor by tensor without loading the model.

Quantised verifiers keep these three in a plain dtype as a rule. FP8 and INT8 ones are dequantised; packed ones are
refused by the name of their format, never read as if their bytes were numbers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from peagle.errors import VerifierError, one_line
from peagle.verifier.model_config import VerifierConfig

_PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "text_model.model.",
    "llm.model.",
    "thinker.model.",
    "transformer.",
    "backbone.",
    "gpt_neox.",
    "decoder.",
    "model.decoder.",
    "",
)
_LEAVES = {
    "embedding": ("embed_tokens", "wte", "embeddings", "embedding", "embed_in", "tok_embeddings", "word_embeddings"),
    "norm": ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "final_norm", "embedding_norm"),
    "head": ("lm_head", "embed_out", "output", "output_layer"),
}
_CLOSE = {"embedding": ("embed", "wte"), "norm": ("norm", "ln_f"), "head": ("head", "output", "embed")}
_PACKED = {  # suffix of the tensor that replaces `.weight` -> name of the format
    "weight_packed": "compressed-tensors, packed",
    "qweight": "GPTQ or AWQ",
    "weight_blocks": "MXFP4",
    "weight_q": "HQQ",
}
_USE_ANOTHER = (
    ", and peagle does not unpack that format. Use a copy of the verifier whose head and embedding are not quantised."
)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# What safetensors, torch and pickle raise for a file that is damaged or of another format.
_UNREADABLE = (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)
_POINTER = b"version https://git-lfs"
_SINGLES = ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors")
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True, kw_only=True)
class VerifierHead:
    """From `last_states` (before the norm) to the verifier's logits. Frozen: no gradient reaches it."""

    norm_weight: Tensor
    """What the normalised state is multiplied by, the 1 of (1 + w) folded in; float32, or float64; [hidden_size]."""
    norm_eps: float
    weight: Tensor
    """[vocab_size, hidden_size], or a pruned vocabulary's rows of it."""
    logit_scale: float
    logit_softcap: float | None

    def normed(self, last_states: Tensor) -> Tensor:
        """Apply the final norm, once, in float32 at least; [..., hidden_size], the result in the dtype of `weight`."""
        states = last_states.to(self.norm_weight.dtype)
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        return (states * scale * self.norm_weight).to(self.weight.dtype)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits over the rows of `weight`, [..., vocab_size], scaled and soft-capped as the verifier's own."""
        logits = F.linear(normed, self.weight)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def restricted(self, ids: Tensor) -> VerifierHead:
        """The head over a pruned vocabulary, given its verifier ids, int64, [draft_vocab_size]."""
        return replace(self, weight=self.weight[ids.to(self.weight.device)].contiguous())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> VerifierHead:
        """The head on `device` with its matrix in `dtype`; the norm stays in float32 (float64 if `dtype` is)."""
        norm_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        return replace(self, norm_weight=self.norm_weight.to(device, norm_dtype), weight=self.weight.to(device, dtype))


def load_head(verifier: VerifierConfig) -> VerifierHead:
    """Read the final norm and the head (of a tied verifier, the embedding), on the CPU in the dtype of the file.

    Raises:
        VerifierError: no weights, unknown tensor names (close ones are listed), a packed head (its format is named),
            shapes that do not fit the configuration, or a norm that is no RMS norm.
    """
    files = TensorFiles.open(verifier.name_or_path)
    norm_name = find_tensor(files, verifier, "norm")
    if norm_name.removesuffix("weight") + "bias" in files.file_of:
        raise VerifierError(
            f"{verifier.name_or_path}: its final norm is a LayerNorm ({norm_name.removesuffix('weight')}bias exists); "
            "drafters read an RMS norm, so this family is not supported"
        )
    norm = _plain(files, norm_name, verifier).to(torch.float32)
    role = "embedding" if verifier.tied else "head"
    weight = _matrix(files, verifier, role)
    if norm.shape != (verifier.hidden_size,):
        raise VerifierError(
            f"{verifier.name_or_path}: {norm_name} has shape {list(norm.shape)}, expected [{verifier.hidden_size}]"
        )
    return VerifierHead(
        norm_weight=norm + 1.0 if verifier.norm_adds_one and not files.is_gguf else norm,
        norm_eps=verifier.rms_norm_eps,
        weight=weight,
        logit_scale=verifier.logit_scale,
        logit_softcap=verifier.logit_softcap,
    )


def load_embedding(verifier: VerifierConfig) -> Tensor:
    """Read the input embedding with the family's scale folded in: the vectors that the first layer sees.

    Returns:
        [vocab_size, hidden_size] on the CPU, in the dtype of the file (float32 when a scale was folded in).
    """
    weight = _matrix(TensorFiles.open(verifier.name_or_path), verifier, "embedding")
    return weight if verifier.embedding_scale == 1.0 else weight.to(torch.float32) * verifier.embedding_scale


def fingerprint(verifier: VerifierConfig, fetches: bool = True) -> str:
    """Hashes that tell this verifier's weights from another's, without reading all of them; see `same_weights`.

    They cover the size of each weight file and 64 KiB at 17 places of it, so they survive copying the folder and notice
    a fine-tune under the same path.

    Returns:
        "WHOLE.FILE.FILE...", files in the order of their names. Unless it `fetches` what is missing, such a file is
        "-", and so is the whole.
    """
    files = TensorFiles.open(verifier.name_or_path)
    whole, parts = hashlib.sha256(), []
    for file in sorted(set(files.file_of.values())):
        path = files.path(file) if fetches else _find(verifier.name_or_path, file, fetches=False)
        if path is None:
            parts.append("-")
            continue
        size = path.stat().st_size
        sample = f"{path.name} {size}".encode()
        with open(path, "rb") as handle:
            for place in range(17):
                handle.seek(max(0, size - (1 << 16)) * place // 16)
                sample += handle.read(1 << 16)
        parts.append(hashlib.sha256(sample).hexdigest()[:16])
        whole.update(sample)
    return ".".join(["-" if "-" in parts else whole.hexdigest(), *parts])


def same_weights(one: str, other: str) -> bool:
    """Whether two fingerprints agree on every file that both have; "" agrees with all."""
    mine, theirs = one.split("."), other.split(".")
    if "" in (one, other) or "-" not in (mine[0], theirs[0]):
        return mine[0] == theirs[0] or "" in (one, other)
    return len(mine) == len(theirs) and all(a == b or "-" in (a, b) for a, b in zip(mine[1:], theirs[1:]))


def weights_are_here(verifier: VerifierConfig) -> bool:
    """Whether all of its weight files are on this machine."""
    try:
        return not fingerprint(verifier, fetches=False).startswith("-")
    except VerifierError:
        return False


def find_tensor(files: TensorFiles, verifier: VerifierConfig, role: str) -> str:
    """The name of the "embedding", "norm" or "head" weight in the files; else a VerifierError lists close ones."""
    given = verifier.tensor_names.get(role)
    if given is not None:
        if given not in files.file_of:
            raise VerifierError(f"{verifier.name_or_path}: no tensor named {given} (given for the {role})")
        return given
    if role == "head":
        prefixes = ("", "language_model.", "model.", *_PREFIXES[2:])
        bases = [prefix + leaf for leaf in _LEAVES[role] for prefix in prefixes]
    else:
        bases = [prefix + leaf for prefix in _PREFIXES for leaf in _LEAVES[role]]
    for base in bases:
        for name in (f"{base}.weight", *(f"{base}.{suffix}" for suffix in _PACKED)):
            if name in files.file_of:
                return name
    names = sorted(files.file_of)
    close = [name for name in names if any(word in name for word in _CLOSE[role]) and ".layers." not in name]
    listed = ", ".join((close or names)[:6])
    reason = "" if role != "head" else " and its configuration says that the head is not tied to the embedding"
    raise VerifierError(
        f"{verifier.name_or_path}: no known tensor name for the {role}{reason}; close ones: {listed}. Name it with "
        f"--verifier-tensors {role}=NAME."
    )


def _matrix(files: TensorFiles, verifier: VerifierConfig, role: str) -> Tensor:
    name = find_tensor(files, verifier, role)
    weight = _plain(files, name, verifier)
    if weight.ndim != 2 or weight.shape[1] != verifier.hidden_size or weight.shape[0] < verifier.vocab_size:
        raise VerifierError(
            f"{verifier.name_or_path}: {name} has shape {list(weight.shape)}, expected [{verifier.vocab_size}, "
            f"{verifier.hidden_size}]"
        )
    return weight[: verifier.vocab_size].contiguous()


def _plain(files: TensorFiles, name: str, verifier: VerifierConfig) -> Tensor:
    """Read a tensor as numbers: dequantised where that is a multiplication, refused where bytes are packed."""
    base, _, suffix = name.rpartition(".")
    if suffix in _PACKED:
        raise VerifierError(f"{verifier.name_or_path}: {name} is quantised ({_PACKED[suffix]}){_USE_ANOTHER}")
    tensor = files.read(name)
    if tensor.dtype in _FLOATS:
        return tensor
    scales = (f"{base}.weight_scale", f"{base}.weight_scale_inv")
    scale_name = next((name for name in scales if name in files.file_of), None)
    eight_bit = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    offset = f"{base}.weight_zero_point" in files.file_of and bool(files.read(f"{base}.weight_zero_point").any())
    if tensor.dtype not in eight_bit or (scale_name is None and tensor.dtype == torch.int8) or offset:
        method = f"quantisation: {verifier.quantization or 'unknown'}"
        raise VerifierError(
            f"{verifier.name_or_path}: {name} is stored as {str(tensor.dtype)[6:]} ({method}){_USE_ANOTHER}"
        )
    values = tensor.to(torch.float32)
    return values if scale_name is None else values * _spread(files.read(scale_name).to(torch.float32), values.shape)


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Bring a scale per tensor, per row or per square block to the shape of what it multiplies."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.ndim == 1:
        return scale[:, None]
    if scale.shape == (shape[0], 1):
        return scale
    rows, columns = (-(-full // part) for full, part in zip(shape, scale.shape))
    rows, columns = 1 << (rows - 1).bit_length(), 1 << (columns - 1).bit_length()  # blocks are powers of two
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


@dataclass(frozen=True)
class TensorFiles:
    """A model's weight files as one table of named tensors, read one at a time."""

    name_or_path: str
    file_of: dict[str, str]
    """Tensor name -> file name inside the model."""

    @staticmethod
    def open(name_or_path: str) -> TensorFiles:
        """List a model's tensors; a VerifierError if it has no weights or one of its files cannot be read."""
        for index in _INDEXES:
            path = _find(name_or_path, index)
            if path is not None:
                try:
                    table = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise VerifierError(f"{path}: not a weight index: {one_line(error)}") from None
                odd = next((file for file in table.values() if not isinstance(file, str)), None)
                if odd is not None:
                    raise VerifierError(f"{path}: not a weight index: it names the file {odd!r}")
                return TensorFiles(name_or_path, table)
        for single in _SINGLES:
            if path := _find(name_or_path, single):
                return TensorFiles(name_or_path, dict.fromkeys(_names(path), single))
        if Path(name_or_path).is_dir():
            table = {}
            for path in sorted(Path(name_or_path).glob("*.safetensors")):
                table.update(dict.fromkeys(_names(path), path.name))
            gguf = gguf_file(name_or_path)
            if not table and gguf is not None:
                stored = set(_gguf_tensors(gguf))
                table = {name: gguf.name for name, theirs in _GGUF_NAMES.items() if theirs in stored}
            if table:
                return TensorFiles(name_or_path, table)
            others = sorted(p.suffix for p in Path(name_or_path).iterdir() if p.suffix in (".pth", ".h5", ".msgpack"))
            hint = f"; found {others[0]} files, which peagle does not read" if others else ""
            raise VerifierError(f"{name_or_path}: no weights (expected model.safetensors, shards with an index){hint}")
        raise VerifierError(f"{name_or_path}: no weights found on the hub (expected safetensors or pytorch_model.bin)")

    @property
    def is_gguf(self) -> bool:
        """Whether the tensors come from a GGUF file, whose norms have the 1 of (1 + w) in them already."""
        return any(file.endswith(".gguf") for file in self.file_of.values())

    @property
    def paths(self) -> list[Path]:
        """All weight files, on this machine."""
        return [self.path(file) for file in sorted(set(self.file_of.values()))]

    def check(self) -> None:
        """Refuse weight files that are missing, empty, cut or pointers: a VerifierError names the first."""
        for path in self.paths:
            if path.suffix != ".gguf":
                _names(path)

    def read(self, name: str) -> Tensor:
        """One tensor as it is stored, on the CPU; a VerifierError if its file is missing or damaged."""
        path = self.path(self.file_of[name])
        if path.suffix == ".gguf":
            return _gguf_tensors(path)[_GGUF_NAMES[name]]()
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as handle:
                    return handle.get_tensor(name).clone()
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)[name].clone()
        except (*_UNREADABLE, KeyError) as error:
            raise VerifierError(f"{path}: {name} cannot be read: {_damage(path) or one_line(error)}") from None

    def path(self, file: str) -> Path:
        """One weight file, on this machine; a VerifierError if it is missing."""
        path = _find(self.name_or_path, file)
        if path is None:
            raise VerifierError(f"{self.name_or_path}: {file} is missing, though the weight index names it")
        return path


def _find(name_or_path: str, file: str, fetches: bool = True) -> Path | None:
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder / file if (folder / file).exists() else None
    from transformers.utils.hub import cached_file

    cached = cached_file(
        name_or_path,
        file,
        local_files_only=not fetches,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if cached is None else Path(cached)


def _names(path: Path) -> list[str]:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as handle:
                return list(handle.keys())
        return list(torch.load(path, map_location="meta", weights_only=True, mmap=True))
    except _UNREADABLE as error:
        raise VerifierError(f"{path}: cannot be read: {_damage(path) or one_line(error)}") from None


def _damage(path: Path) -> str | None:
    """What is wrong with a weight file whatever its format; None if nothing that shows."""
    try:
        with open(path, "rb") as handle:
            start = handle.read(len(_POINTER))
    except OSError:
        return None
    if not start:
        return "an empty file; fetch it again"
    return "a git-lfs pointer instead of the weights; fetch them with `git lfs pull`" if start == _POINTER else None


def gguf_file(name_or_path: str) -> Path | None:
    """The GGUF file of a model folder that has no other weights; a VerifierError if there are several."""
    folder = Path(name_or_path)
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    if not files or any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return None
    if len(files) > 1:
        raise VerifierError(
            f"{folder}: {len(files)} GGUF files ({files[0].name}, {files[1].name} ...); keep one of them"
        )
    return files[0]


def _gguf_tensors(path: Path) -> dict[str, Callable[[], Tensor]]:
    """Readers of a GGUF file's tensors by its own names: dequantised, rows as PyTorch has them."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise VerifierError(f"{path}: GGUF files need the package gguf; pip install 'peagle[gguf]'") from None

    def read(tensor: Any) -> Tensor:
        try:
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError:
            raise VerifierError(
                f"{path}: {tensor.name} is quantised as {tensor.tensor_type.name}, unknown here"
            ) from None
        return values.to(torch.float32).reshape([int(size) for size in tensor.shape[::-1]])

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise VerifierError(f"{path}: cannot be read: {one_line(error)}") from None
    return {tensor.name: functools.partial(read, tensor) for tensor in reader.tensors}
