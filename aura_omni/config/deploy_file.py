"""Reading a deploy file: YAML, `${...}`, `base_config`. Out comes one plain mapping.

Knows the shape of the file, not what its keys mean (`deploy_keys`) and not the flags (`config`).

    deploy = read("aura_omni.yaml", environ=os.environ)
    deploy.content["stages"][1]["model"]

Interpolation, in any text of the file: `${oc.env:NAME}` and `${oc.env:NAME,default}` are an environment variable,
`${stages.1.model}` is another value of the same file (list items by position). They nest. A value that is nothing but
one `${...}` keeps the type of what it names; an environment variable is read as YAML would read it (`0.3` is a number).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aura_omni.errors import ConfigError, meant, shown

PACKAGED = Path(__file__).parent.parent / "deploy"

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")  # without braces inside, so the innermost is found first
_MERGED = ("stages", "platforms", "connectors")  # what `base_config` merges; other keys of an overlay replace
_FLATTENED = ("engine_args", "runtime")


@dataclass(frozen=True, slots=True)
class DeployFile:
    """content: top-level key -> value as in the file, except that `stages` and each platform's `stages` are
    mappings from stage_id, with `engine_args` and `runtime` of a stage laid flat, and `base_config` is merged in."""

    path: Path
    content: Mapping[str, Any]


def packaged_names() -> tuple[str, ...]:
    return tuple(sorted(path.name for path in PACKAGED.glob("*.yaml")))


def find(source: str) -> Path:
    """source: a path, or the name of a packaged file (its last component counts, `.yaml` may be left off)."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    name = f"{path.stem if path.suffix in {'.yaml', '.yml'} else path.name}.yaml"
    if name in packaged_names():
        return PACKAGED / name
    raise ConfigError(
        f"deploy file not found: {source}. Give a path or a packaged file; {meant(name, packaged_names())}"
    )


def read(source: str, *, environ: Mapping[str, str]) -> DeployFile:
    path = find(source)
    return DeployFile(path, _with_base(path, environ, ()))


def _with_base(path: Path, environ: Mapping[str, str], seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"base_config goes in a circle: {' -> '.join(str(item) for item in (*seen, path.resolve()))}")
    content = _normalised(_Resolver(_parse(path), environ, path).document(), path)
    base = content.pop("base_config", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base_config is {shown(base)}; it must be a path")
    beside = path.parent / base
    below = _with_base(beside if beside.is_file() else find(base), environ, (*seen, path.resolve()))
    return below | {
        key: _merged(below[key], value) if key in _MERGED and key in below else value for key, value in content.items()
    }


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merged(below[key], value) if key in below else value for key, value in above.items()}


# ---------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML is untyped
    """Safe YAML that refuses a key given twice (PyYAML keeps the last) and reads 1e-3 as a number (it does not)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for index, key in enumerate(keys):
            if any(key.value == other.value for other in keys[:index]):
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_scalar(text: str) -> Any:
    """What YAML makes of a scalar; text that is not one stays text."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict | list) else value


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"deploy file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"deploy file {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"deploy file {path} holds {type(content).__name__}; it must be a mapping of keys")
    return content


# ---------------------------------------------------------------- ${...}


@dataclass(frozen=True, slots=True)
class _Resolver:
    root: dict[str, Any]
    environ: Mapping[str, str]
    path: Path

    def document(self) -> dict[str, Any]:
        return {key: self.value(item, ()) for key, item in self.root.items()}

    def value(self, node: Any, trail: tuple[str, ...]) -> Any:
        """trail: the references that led here, to notice a circle."""
        if isinstance(node, dict):
            return {key: self.value(item, trail) for key, item in node.items()}
        if isinstance(node, list):
            return [self.value(item, trail) for item in node]
        return self._text(node, trail) if isinstance(node, str) else node

    def _text(self, text: str, trail: tuple[str, ...]) -> Any:
        while match := _REFERENCE.search(text):
            found = self._look_up(match[1].strip(), trail)
            if match[0] == text:
                return found
            if isinstance(found, dict | list) or "${" in str(found):
                raise ConfigError(f"{self.path}: {match[0]} is {shown(found)}, which cannot stand inside a text")
            text = text[: match.start()] + str(found) + text[match.end() :]
        if "${" in text:
            raise ConfigError(f"{self.path}: {shown(text)} has a ${{ without its }}")
        return text

    def _look_up(self, reference: str, trail: tuple[str, ...]) -> Any:
        if reference in trail:
            raise ConfigError(f"{self.path}: ${{...}} goes in a circle: {' -> '.join((*trail, reference))}")
        resolver, colon, rest = reference.partition(":")
        if not colon:
            return self.value(self._at(reference), (*trail, reference))
        if resolver != "oc.env":
            raise ConfigError(
                f"{self.path}: ${{{reference}}}: only ${{oc.env:NAME,default}} and ${{key.path}} are known"
            )
        name, comma, default = (part.strip() for part in rest.partition(","))
        if name in self.environ:
            return parse_scalar(self.environ[name])
        if not comma:
            raise ConfigError(
                f"{self.path}: environment variable {name} is not set. Set it, or write ${{oc.env:{name},default}}"
            )
        return parse_scalar(default)

    def _at(self, reference: str) -> Any:
        node: Any = self.root
        for step in reference.replace("[", ".").replace("]", "").split("."):
            if isinstance(node, dict) and step in node:
                node = node[step]
            elif isinstance(node, list) and step.isdigit() and int(step) < len(node):
                node = node[int(step)]
            else:
                raise ConfigError(f"{self.path}: ${{{reference}}}: the file has no {shown(step)} there")
        return node


# ---------------------------------------------------------------- shape


def _normalised(content: dict[str, Any], path: Path) -> dict[str, Any]:
    content = {key: value for key, value in content.items() if value is not None}
    if "stage_args" in content:
        raise ConfigError(f"{path}: stage_args is the layout of 2025; move each entry to stages: [{{stage_id: ...}}]")
    if "stages" in content:
        content["stages"] = _by_id(content["stages"], f"{path}: stages")
    if "platforms" in content:
        platforms = mapping(content["platforms"], f"{path}: platforms")
        content["platforms"] = {
            name: {
                key: _by_id(value, f"{path}: platforms.{name}.stages") if key == "stages" else value
                for key, value in mapping(block or {}, f"{path}: platforms.{name}").items()
            }
            for name, block in platforms.items()
        }
    return content


def mapping(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {shown(value)}; it must be a mapping of keys")
    return value


def _by_id(stages: Any, where: str) -> dict[int, dict[str, Any]]:
    if not isinstance(stages, list):
        raise ConfigError(f"{where} is {shown(stages)}; it must be a list of stages, each with its stage_id")
    found: dict[int, dict[str, Any]] = {}
    for stage in stages:
        stage = dict(mapping(stage, f"{where}[]"))
        number = stage.pop("stage_id", None)
        if not isinstance(number, int) or isinstance(number, bool):
            raise ConfigError(f"{where}: stage_id is {shown(number)}; each stage needs a whole number")
        if number in found:
            raise ConfigError(f"{where}: stage_id {number} is given twice")
        found[number] = flattened(stage, f"{where}[stage_id {number}]")
    return found


def flattened(stage: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The stage's keys with those below `engine_args` and `runtime` beside the others."""
    flat = {key: value for key, value in stage.items() if key not in _FLATTENED}
    for group in _FLATTENED:
        for key, value in mapping(stage.get(group) or {}, f"{where}.{group}").items():
            if key in flat and flat[key] != value:
                raise ConfigError(
                    f"{where}: {key} is {shown(flat[key])} and also {shown(value)} in {group}; say it once"
                )
            flat[key] = value
    return flat
