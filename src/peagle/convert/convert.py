"""`peagle convert`: other projects' checkpoints to ours, and back where their layout has a place for everything.

What was read is recorded in our `config.json` (`converted_from`), what is written elsewhere carries our config along
(`peagle_config`), so that there and back gives the same tensors and the same config, to the bit.
"""

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from peagle.convert.config import ConvertConfig
from peagle.convert.formats import Foreign, as_json, layout_of, read_foreign, read_foreign_config, write_foreign
from peagle.convert.tensors import Origin, import_tensors, restore_tensors, shapes_of
from peagle.drafter.checkpoint import CONFIG, DTYPES, WEIGHTS, write_into
from peagle.drafter.model_config import DrafterConfig
from peagle.errors import CheckpointError, ConfigError
from peagle.files import whole_folder, write_json

logger = logging.getLogger(__name__)

ORIGIN = "converted_from"
# Fields of our config that may change without the original config becoming wrong.
_FREE = {"num_speculative_tokens", "verifier", "verifier_architectures"}


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A checkpoint in our words."""

    config: DrafterConfig
    tensors: dict[str, Tensor]
    dtype: str
    origin: Origin | None
    """How it was written before it was ours; None if it always was."""
    notes: tuple[str, ...]
    """What had to be assumed."""


def convert(settings: ConvertConfig) -> None:
    """Read a checkpoint, write it in another layout.

    Raises:
        CheckpointError: it cannot be read, or something in it cannot be carried; nothing is written.
        ConfigError: the output exists.
    """
    if settings.output.exists():
        raise ConfigError(f"--output {settings.output}: is there already; name a new folder")
    foreign = read_foreign(settings.source)
    layout = layout_of(foreign)
    converted = read(foreign, layout, settings)
    for note in converted.notes:
        logger.info("%s: %s", settings.source, note)
    with whole_folder(settings.output) as folder:
        count = _write(converted, settings, folder)
    config = converted.config
    kind = "P-EAGLE" if config.speculators_model_type == "peagle" else "EAGLE-3"
    made = f"{kind}, {config.num_layers} layer{'' if config.num_layers == 1 else 's'}, {converted.dtype}"
    counts = f"read {len(foreign.tensors)} tensors ({layout}), wrote {count} ({settings.to})"
    logger.info("%s to %s: %s", counts, settings.output, made)


def read(foreign: Foreign, layout: str, settings: ConvertConfig) -> Converted:
    """Put a checkpoint into our words.

    Raises:
        CheckpointError: something in it cannot be carried.
    """
    dtype, tensors = _one_dtype(foreign, settings.dtype)
    foreign = replace(foreign, config=as_json(foreign.config), tensors=tensors)
    if layout == "peagle":
        return _read_ours(foreign, dtype)
    config, notes = read_foreign_config(foreign, layout, settings)
    ours, origin = import_tensors(foreign, layout, config, settings)
    for added in sorted(origin.added):
        source = "zeros" if added.endswith(".bias") else "the verifier's"
        notes = (*notes, f"no tensor {added} in the source: {source}")
    return Converted(config=config, tensors=ours, dtype=dtype, origin=origin, notes=notes)


def _read_ours(foreign: Foreign, dtype: str) -> Converted:
    config = DrafterConfig.from_json(foreign.config, f"{foreign.where}/{CONFIG}")
    wanted = shapes_of(config)
    for name in sorted(wanted.keys() | foreign.tensors.keys()):
        there = tuple(foreign.tensors[name].shape) if name in foreign.tensors else None
        if there != wanted.get(name):
            found = f"tensor {name} is {there}, its config.json asks for {wanted.get(name)}"
            raise CheckpointError(f"{foreign.where}: {found}")
    recorded = foreign.config.get(ORIGIN)
    origin = None if recorded is None else Origin(**recorded)
    return Converted(config=config, tensors=foreign.tensors, dtype=dtype, origin=origin, notes=())


def _write(converted: Converted, settings: ConvertConfig, folder: Path) -> int:
    """Write the target layout into a folder; returns the number of tensors."""
    origin, to, where = converted.origin, settings.to, settings.source
    if to == "peagle" or (to == "speculators" and (origin is None or origin.layout != to)):
        write_into(folder, converted.config, converted.tensors, converted.dtype)
        if to == "peagle" and origin is not None:
            write_json(folder / CONFIG, {**converted.config.to_json(converted.dtype), ORIGIN: asdict(origin)})
        return len(converted.tensors)
    if origin is not None and origin.layout == to:
        now = converted.config.model_dump(mode="json")
        changed = [name for name in now if name not in _FREE and origin.read_as.get(name) != now[name]]
        if changed:
            text = f"{', '.join(changed)} changed since it was converted from {to}"
            raise CheckpointError(f"{where}: {text}; remove {ORIGIN} from its config.json to have it written anew")
        flat, tensors = origin.config, restore_tensors(converted.tensors, converted.config, origin, where)
    else:
        flat, tensors = write_foreign(converted.config, converted.tensors, converted.dtype, settings)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, flat)
    return len(tensors)


def _one_dtype(foreign: Foreign, wanted: str) -> tuple[str, dict[str, Tensor]]:
    """The type of all floating tensors, and the tensors in it."""
    types = sorted({str(t.dtype).removeprefix("torch.") for t in foreign.tensors.values() if t.is_floating_point()})
    if wanted == "auto":
        if len(types) != 1 or types[0] not in DTYPES:
            raise CheckpointError(f"{foreign.where}: tensors are of types {', '.join(types)}; choose one with --dtype")
        return types[0], foreign.tensors
    return wanted, {name: t.to(DTYPES[wanted]) if t.is_floating_point() else t for name, t in foreign.tensors.items()}
