"""The base of every stage's configuration: one frozen model is the only source of flags, YAML keys and doc tables."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_serializer,
    model_validator,
)
from typing_extensions import Self

from peagle import embedded
from peagle.errors import MASK, ConfigError, keep_secret, masked, one_line, passwords

Config = TypeVar("Config", bound="StageConfig")
API_KEY, ENDPOINT_PASSWORD = "PEAGLE_API_KEY", "PEAGLE_ENDPOINT_PASSWORD"
"""Variables of the environment."""


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _texts(value: Any) -> list[str]:
    """A setting's texts, of which each may be an address."""
    return [one for one in _listed(value) if isinstance(one, str)]


class StageConfig(BaseModel):
    """A stage's settings: frozen, unknown keys refused, each field's docstring is its help text.

    A field with `json_schema_extra={"positional": True}` becomes an argument instead of a flag; with
    `{"panel": "Optimizer"}` it is listed under that heading in `--help`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    @model_validator(mode="after")
    def _keep_secrets(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, SecretStr):
                keep_secret(value.get_secret_value())
            for text in _texts(value):
                for password in passwords(text):
                    keep_secret(password)
        return self

    @field_serializer("*", mode="wrap", when_used="json", check_fields=False)
    def _without_secrets(self, value: Any, as_usual: SerializerFunctionWrapHandler) -> Any:
        """What goes into files (run.yaml, settings, trackers) holds no key and no password."""
        if isinstance(value, SecretStr):
            return None
        found = as_usual(value)
        if isinstance(found, list):
            return [masked(one) if isinstance(one, str) else one for one in found]
        return masked(found) if isinstance(found, str) else found

    @classmethod
    def build(cls: type[Config], values: Mapping[str, Any]) -> Config:
        """Validate `values` (defaults fill the rest); `embedded:verifier` and its like become paths.

        Raises:
            ConfigError: one line that names the key, the value and what was expected.
        """
        try:
            return cls(**{key: embedded.resolve(value) for key, value in values.items()})
        except ValidationError as error:
            raise ConfigError(explain(cls, error)) from None


_SAMPLING: Any = {"panel": "Sampling"}
SERVER: Any = {"panel": "Served verifier"}
LAST_PANELS = ("Sampling", "Served verifier")
"""Headings that come after a stage's own settings, though these classes come first."""


class Sampling(StageConfig):
    """How tokens are chosen."""

    temperature: float = Field(default=0.0, ge=0, json_schema_extra=_SAMPLING)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1, json_schema_extra=_SAMPLING)
    """Sample from the most probable tokens that together reach this."""
    seed: int = Field(default=0, ge=0, json_schema_extra=_SAMPLING)
    """Seed of the sampling; each row draws from its own generator, whatever the batches are."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, always."""
        return self.temperature == 0


class ServerSettings(StageConfig):
    """Where servers are and how they are asked; each stage says what its `endpoint` serves."""

    endpoint: tuple[str, ...] = Field((), json_schema_extra=SERVER)
    """Address of a vLLM server of this verifier, such as http://localhost:8000/v1; may be repeated."""
    concurrency: int = Field(32, ge=1, json_schema_extra=SERVER)
    """Requests under way at once (in training: of each rank)."""
    request_timeout_s: float = Field(600.0, gt=0, json_schema_extra=SERVER)
    """Longest wait for one answer."""
    max_retries: int = Field(3, ge=0, json_schema_extra=SERVER)
    """Further tries after a passing error (408, 409, 425, 429, 5xx, a timeout)."""
    restart_wait_s: float = Field(300.0, ge=0, json_schema_extra=SERVER)
    """How long the servers may be gone before the run stops; what is stored is kept."""
    api_key: SecretStr | None = Field(None, json_schema_extra=SERVER)
    """Sent to the servers as a bearer token. Unset: PEAGLE_API_KEY of the environment, which no list of processes
    shows. It is written to no file and no log; neither is the password of an endpoint `http://user:password@host`
    (PEAGLE_ENDPOINT_PASSWORD, where a written setting is used again)."""
    served_model_name: str | None = Field(None, json_schema_extra=SERVER)
    """Name under which the servers know the verifier, if not its own."""

    @model_validator(mode="before")
    @classmethod
    def _from_environment(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        found = dict(values)
        if found.get("api_key") is None and os.environ.get(API_KEY):
            found["api_key"] = SecretStr(os.environ[API_KEY])
        hidden, password = f"{MASK}@", os.environ.get(ENDPOINT_PASSWORD)
        for name in ("endpoint", "plain_endpoint"):
            given = found.get(name)
            if not any(hidden in text for text in _texts(given)):
                continue
            if not password:
                raise ValueError(
                    f"--{name.replace('_', '-')}: its password was not written down; set {ENDPOINT_PASSWORD}, or "
                    "give the address again"
                )
            filled = [one.replace(hidden, f"{password}@") if isinstance(one, str) else one for one in _listed(given)]
            found[name] = filled[0] if isinstance(given, str) else filled
        return found

    @property
    def authorization(self) -> dict[str, str]:
        """Headers that every request carries."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key.get_secret_value()}"}

    def child_environment(self) -> dict[str, str]:
        """Variables by which another process gets what is written nowhere."""
        found = {} if self.api_key is None else {API_KEY: self.api_key.get_secret_value()}
        known = [password for one in self.endpoint for password in passwords(one)]
        return found | ({ENDPOINT_PASSWORD: known[0]} if known else {})


def explain(config_type: type[BaseModel], error: ValidationError) -> str:
    """One line for a pydantic error: the first fault of each key, with the nearest name for an unknown one."""
    parts = []
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, config_type.model_fields, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            parts.append(f"unknown key `{name}`{hint}")
        elif fault["type"] == "missing":
            field = config_type.model_fields.get(name)
            extra = field.json_schema_extra if field is not None else None
            is_positional = isinstance(extra, dict) and bool(extra.get("positional"))
            parts.append(f"{name.upper() if is_positional else '--' + name.replace('_', '-')} is needed")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            flag = f"--{name.replace('_', '-')}: " if name else ""
            field = config_type.model_fields.get(name.split(".")[0])
            is_secret = field is not None and "SecretStr" in str(field.annotation)
            is_shown = bool(name) and not isinstance(fault["input"], dict) and not is_secret
            parts.append(flag + message + (f" (found {fault['input']!r})" if is_shown else ""))
    return "; ".join(dict.fromkeys(parts))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        ConfigError: the file is missing, is not YAML, or does not hold a mapping.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {one_line(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, found a {type(values).__name__}")
    odd = next((key for key in values if not isinstance(key, str)), None)
    if odd is not None:
        raise ConfigError(f"{path}: the key {odd!r} is no name")
    return values
