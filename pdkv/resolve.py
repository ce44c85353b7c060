"""A config out of a command line, an environment and a file.

Guarantees: a flag wins over the environment (`PDKV_<FIELD>`), the environment over the YAML file, the file over the
default; an unknown name is refused wherever it stands, with the known one that is most like it; a value that can't be
used is a `ConfigError` with the field, the value and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from pdkv.config import ENV_PREFIX, ROLES, ServiceConfig
from pdkv.errors import ConfigError
from pdkv.fields import field_kind

AnyConfig = TypeVar("AnyConfig", bound=ServiceConfig)


def load_config_file(path: str | Path) -> dict[str, Any]:
    """A YAML file's top-level mapping. Raises `ConfigError` if there is none."""
    try:
        content = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as e:  # a ValueError of bytes that are no text, or of a date or number
        raise ConfigError("config", str(path), f"a YAML file ({e})") from e
    content = {} if content is None else content
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError("config", str(path), "a YAML mapping of field names to values")
    return content


def resolve(
    cls: type[AnyConfig],
    flags: Mapping[str, Any],
    yaml_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> AnyConfig:
    """The config of one role: flags over environment over file over defaults; a flag that is None was not given.

    A `PDKV_` variable may belong to another role (they often share an environment), but not to none. Raises
    `ConfigError`.
    """
    values = load_config_file(yaml_path) if yaml_path is not None else {}
    values |= _from_environment(cls, os.environ if environ is None else environ)
    values |= {name: value for name, value in flags.items() if value is not None}
    try:
        return cls.model_validate(values)
    except ValidationError as e:
        raise _named(cls, e) from e


def _from_environment(cls: type[ServiceConfig], environ: Mapping[str, str]) -> dict[str, str]:
    known = {name for role in ROLES for name in role.model_fields}
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in known:
            raise ConfigError(variable, value, _one_of(variable, (f"{ENV_PREFIX}{n.upper()}" for n in known)))
        if name in cls.model_fields:
            found[name] = value
    return found


def _named(cls: type[ServiceConfig], error: ValidationError) -> ConfigError:
    """The first of pydantic's complaints as an error of ours."""
    first = error.errors()[0]
    where, have = first["loc"], first["input"]
    if not where:
        # a rule over several fields names the one to change itself
        field, _, allowed = first["msg"].removeprefix("Value error, ").partition(": ")
        return ConfigError(field, have.get(field) if isinstance(have, dict) else getattr(have, field, None), allowed)
    field = ".".join(map(str, where))
    if first["type"] == "extra_forbidden":
        return ConfigError(field, have, _one_of(field, cls.model_fields))
    kind = field_kind(cls.model_fields[str(where[0])])
    if first["type"] == "missing":
        return ConfigError(field, None, f"{kind.words}; it has no default")
    # an entry of a list by what entries are
    return ConfigError(field, have, kind.items.words if len(where) > 1 and kind.items else kind.words)


def _one_of(name: str, known: Iterable[str]) -> str:
    """What might have been meant comes first."""
    names = sorted(known)
    meant = get_close_matches(name, names, n=1)
    return "".join(f"did you mean {each}? " for each in meant) + "one of " + ", ".join(names)
