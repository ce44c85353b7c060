"""Everything two nodes must agree on before one byte moves.

Guarantees: every field of `Contract` carries its rule (`content`, `pair`, `compatible`, `informative`); `diff` reports
every field that breaks its rule, with both values; the content fingerprint covers exactly what determines the bytes of
a page, and is the same in every process. Layers are compared as lists, never as counts. Pure: no clock, no I/O.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, get_type_hints

from pdkv.errors import ConfigError, ContractMismatch, Difference, ProtocolError
from pdkv.geometry.model_config import ModelShape
from pdkv.geometry.page_layout import Group, PageFormat
from pdkv.geometry.sharding import Sharding, require_plannable

PROTOCOL_MAJOR = 1
"""Changes when an older node can't read a message or would act wrongly on it."""
PROTOCOL_MINOR = 0
HASH_ALGORITHM = "sha256(previous, tokens u32le)"
SEED_RULE = "pdkv-1(content fingerprint, extra_key, cache_salt)"
PLACEMENTS = ("page_major", "layer_major")
SPECULATIONS = ("none", "eagle", "mtp", "oracle")
"""An oracle has no rows of its own: it is for tests and the demo."""
SPREADS = ("replicated", "sharded")
EAGLE_RULES = ("none", "bigram", "drop_page")

MAX_TEXT = 1024
"""Characters of one text of a peer's contract."""
MAX_ENTRIES = 4096
"""Entries of one list of a peer's contract: GLM-5.3 with a draft layer has 101 segments."""

Rule = Literal["content", "pair", "compatible", "informative"]
SegmentSizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """How a deployment spreads over ranks; `main` and `index`: "replicated" or "sharded" over the DCP ranks."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    dcp: int = 1
    main: str = "replicated"
    index: str = "replicated"
    interleave: int = 1
    """Consecutive tokens whose main rows are on one DCP rank."""

    @property
    def sharding(self) -> Sharding:
        """Of the main rows. Raises `ConfigError` for sizes that no group has."""
        return Sharding(self.tp, self.dcp, self.interleave) if self.main == "sharded" else Sharding(self.tp)


CONTENT: Mapping[str, Rule] = {"rule": "content"}
PAIR: Mapping[str, Rule] = {"rule": "pair"}
COMPATIBLE: Mapping[str, Rule] = {"rule": "compatible"}
INFORMATIVE: Mapping[str, Rule] = {"rule": "informative"}


@dataclass(frozen=True)
class Contract:
    """What a node promises about its pages, one field a fact. Built by `build_contract`, or read from a peer."""

    architecture: str = field(metadata=CONTENT)
    weights_id: str = field(metadata=CONTENT)
    """Revision, or digest of config and weight index."""
    vocab_size: int = field(metadata=CONTENT)
    num_layers: int = field(metadata=CONTENT)
    indexer_types: tuple[str, ...] = field(metadata=CONTENT)
    """"full" or "shared", one a layer, from what the engine allocated."""
    draft_layers: int = field(metadata=CONTENT)
    main_row_format: str = field(metadata=CONTENT)
    main_row_bytes: int = field(metadata=CONTENT)
    main_row_parts: str = field(metadata=CONTENT)
    scale_rule: str = field(metadata=CONTENT)
    rope_dtype: str = field(metadata=CONTENT)
    rope_order: str = field(metadata=CONTENT)
    index_row_bytes: int = field(metadata=CONTENT)
    index_order: str = field(metadata=CONTENT)
    index_kpool: int = field(metadata=CONTENT)
    index_topk: int = field(metadata=CONTENT)
    """Layers above depend on which tokens were selected, so a page's bytes do (docs/decisions/0003)."""
    page_tokens: int = field(metadata=CONTENT)
    segments: SegmentSizes = field(metadata=CONTENT)
    """(name, bytes a page), in order."""
    hash_algorithm: str = field(metadata=CONTENT)
    bigram: bool = field(metadata=CONTENT)
    seed_rule: str = field(metadata=CONTENT)

    speculation: str = field(metadata=PAIR)
    eagle_rule: str = field(metadata=PAIR)
    rollback_tokens: int = field(metadata=PAIR)
    draft_tokens: int = field(metadata=PAIR)
    draft_topk: int = field(metadata=PAIR)
    index_sharing: bool = field(metadata=PAIR)
    """Effective sharing of the index across draft iterations."""
    protocol_major: int = field(metadata=PAIR)

    topology: Topology = field(metadata=COMPATIBLE)
    placement: str = field(metadata=COMPATIBLE)
    digest_algorithms: tuple[str, ...] = field(metadata=COMPATIBLE)
    protocol_minor: int = field(metadata=COMPATIBLE)

    version: str = field(metadata=INFORMATIVE)
    lane: str = field(metadata=INFORMATIVE)
    host: str = field(metadata=INFORMATIVE)
    gpu: str = field(metadata=INFORMATIVE)
    engine: str = field(metadata=INFORMATIVE)
    """Name of what computes the rows."""

    @cached_property  # it is compared with that of every message
    def content_fingerprint(self) -> bytes:
        """32 bytes: SHA-256 of the canonical JSON of the content fields."""
        return _digest(self, ("content",))

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes: SHA-256 of the canonical JSON of the content and pair fields."""
        return _digest(self, ("content", "pair"))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, every field once; `from_dict` turns it back."""
        return {name: _plain(getattr(self, name)) for name in RULES}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Contract:
        """Raises `ProtocolError` naming the field that is missing, of another type, or too large. Values that this
        version doesn't know are kept: `diff` is what refuses them, by name."""
        hints = get_type_hints(cls)
        return cls(**{name: _typed(name, hints[name], values.get(name)) for name in RULES})


RULES: dict[str, Rule] = {f.name: f.metadata["rule"] for f in dataclasses.fields(Contract)}
_EQUAL = attrgetter(*(name for name, rule in RULES.items() if rule in ("content", "pair")))


@dataclass(frozen=True, slots=True)
class ContractFacts:
    """What neither the model's shape nor the page format says."""

    weights_id: str
    speculation: str = "none"
    eagle_rule: str = "none"
    rollback_tokens: int = 0
    draft_tokens: int = 0
    draft_topk: int = 0
    index_sharing: bool = False
    topology: Topology = Topology()
    placement: str = "page_major"
    digest_algorithms: tuple[str, ...] = ("xxh3_64",)
    version: str = ""
    lane: str = ""
    host: str = ""
    gpu: str = ""
    engine: str = ""


def build_contract(shape: ModelShape, fmt: PageFormat, *, identity: ContractFacts) -> Contract:
    """The contract of a node that allocated `fmt` for `shape`. Raises `ConfigError` naming the field that can't be."""
    _check_facts(shape, fmt, identity)
    row = fmt.main_row
    rope = next((part.dtype for part in row.parts if part.name == "rope"), "none")
    facts = {f.name: getattr(identity, f.name) for f in dataclasses.fields(identity)}
    return Contract(
        architecture=shape.architecture,
        vocab_size=shape.vocab_size,
        num_layers=shape.num_layers,
        indexer_types=tuple(shape.indexer_types),
        draft_layers=shape.draft_layers,
        main_row_format=row.name,
        main_row_bytes=row.row_bytes,
        main_row_parts=" ".join(f"{part.name}={part.count}*{part.dtype}" for part in row.parts),
        scale_rule=row.scale_rule,
        rope_dtype=rope,
        rope_order=row.rope_order,
        index_row_bytes=fmt.index_row.row_bytes,
        index_order=fmt.index_row.order,
        index_kpool=shape.index_kpool,
        index_topk=shape.index_topk,
        page_tokens=fmt.page_tokens,
        segments=tuple((segment.name, segment.length) for segment in fmt.segments),
        hash_algorithm=HASH_ALGORITHM,
        bigram=identity.eagle_rule == "bigram",
        seed_rule=SEED_RULE,
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
        **facts,
    )


def diff(mine: Contract, theirs: Contract) -> list[Difference]:
    """Every field that breaks its rule, in the order of the fields; empty: the two may exchange pages."""
    equal = _EQUAL(mine) == _EQUAL(theirs)  # as a rule: it is asked of every request
    found = []
    for name, rule in RULES.items():
        if rule in ("content", "pair"):
            if not equal and getattr(mine, name) != getattr(theirs, name):
                found.append((name, f"{rule}: equal"))
        elif rule == "compatible" and (reason := _clash(name, mine, theirs)):
            found.append((name, f"compatible: {reason}"))
    return [Difference(name, shown(getattr(mine, name)), shown(getattr(theirs, name)), due) for name, due in found]


def require_compatible(mine: Contract, theirs: Contract) -> None:
    """Raises `ContractMismatch` with all differences."""
    if differences := diff(mine, theirs):
        raise ContractMismatch(differences)


def require_equal_shards(mine: Contract, theirs: Contract) -> None:
    """For a reader that takes whole pages from one rank: raises `ContractMismatch` unless that rank's pages hold the
    tokens that its own do. `geometry.sharding.plan_shards` says what to read from which rank otherwise.
    """
    ours, other = mine.topology.sharding, theirs.topology.sharding
    if (ours.dcp, ours.interleave) != (other.dcp, other.interleave):
        words = "equal dcp and interleave of sharded main rows, to read page by page"
        raise ContractMismatch([Difference("topology", shown(mine.topology), shown(theirs.topology), words)])


def common_digest(mine: Contract, theirs: Contract) -> str:
    """The digest algorithm both use: the one both rank best, so that both sides choose the same by themselves.

    Raises `ContractMismatch` if there is none.
    """
    ours, other = mine.digest_algorithms, theirs.digest_algorithms
    common = set(ours) & set(other)
    if not common:
        raise ContractMismatch([d for d in diff(mine, theirs) if d.field == "digest_algorithms"])
    return min(common, key=lambda name: (ours.index(name) + other.index(name), name))


def shown(value: object) -> str:
    """A field's value for a reader, whole but short: segments of one size are named together."""
    if isinstance(value, Topology):
        return " ".join(f"{name}={part}" for name, part in dataclasses.asdict(value).items())
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        groups: dict[tuple[str, int], list[str]] = {}
        for name, size in value:
            kind, _, layer = name.rpartition(".")
            groups.setdefault((kind, size), []).append(layer)
        return "; ".join(f"{kind}.[{' '.join(layers)}]={size}" for (kind, size), layers in groups.items())
    if isinstance(value, tuple):
        return "[" + " ".join(map(str, value)) + "]"
    return str(value)


# --- rules of the compatible fields -----------------------------------------------------------------------------------


def _clash(name: str, mine: Contract, theirs: Contract) -> str:
    """Why two values of a compatible field can't work together; empty if they can. A later minor only adds."""
    if name == "topology":
        return _topology_clash(mine, theirs)
    if name == "placement":
        unknown = [side for side in (mine, theirs) if side.placement not in PLACEMENTS]
        return f"each one of {', '.join(PLACEMENTS)}" if unknown else ""
    if name == "digest_algorithms":
        return "" if set(mine.digest_algorithms) & set(theirs.digest_algorithms) else "a common one"
    return ""


def _topology_clash(mine: Contract, theirs: Contract) -> str:
    """TP, DP and DCP sizes are free where `plan_shards` can map one group onto the other: it can for sharded main rows,
    and not for index-K that isn't on every rank. A pipeline stage needs the same layers."""
    sides = mine.topology, theirs.topology
    if sides[0].pp != sides[1].pp:
        return "equal pp"
    if any(side.index != "replicated" for side in sides):
        return "index replicated on both"
    if any(side.main not in SPREADS for side in sides):
        return f"main {' or '.join(SPREADS)}"
    for side in (mine, theirs):
        try:
            require_plannable(side.page_tokens, side.topology.sharding)
        except ConfigError as error:
            return f"{error.fields['field']} {error.fields['allowed']}"
    return ""


def _check_facts(shape: ModelShape, fmt: PageFormat, facts: ContractFacts) -> None:
    for name, value, allowed in (
        ("speculation", facts.speculation, SPECULATIONS),
        ("eagle_rule", facts.eagle_rule, EAGLE_RULES),
        ("placement", facts.placement, PLACEMENTS),
        ("topology.main", facts.topology.main, SPREADS),
        ("topology.index", facts.topology.index, ("replicated",)),
    ):
        if value not in allowed:
            raise ConfigError(name, value, ", ".join(allowed))
    require_plannable(fmt.page_tokens, facts.topology.sharding)
    if not facts.weights_id:
        raise ConfigError("weights_id", facts.weights_id, "a revision, or a digest of config and weight index")
    if not facts.digest_algorithms:
        raise ConfigError("digest_algorithms", facts.digest_algorithms, "at least one")
    if facts.speculation == "none" and facts.eagle_rule != "none":
        raise ConfigError("eagle_rule", facts.eagle_rule, "none, as speculation is none")
    if facts.index_sharing and facts.draft_topk != 1:
        raise ConfigError("index_sharing", facts.index_sharing, f"false, as draft_topk is {facts.draft_topk}, not 1")
    if shape.draft_layers > 1:
        raise ConfigError("draft_layers", shape.draft_layers, "0 or 1: a page's hash covers a lookahead of one token")
    if shape.draft_layers and facts.eagle_rule != "bigram":
        raise ConfigError("eagle_rule", facts.eagle_rule, "bigram: draft rows depend on the token after each position")
    index_layers = tuple(
        s.layer for s in fmt.segments if s.group == Group.INDEX and not s.pending and s.layer < shape.num_layers
    )
    if index_layers != tuple(shape.full_layers):
        raise ConfigError("segments", index_layers, f"index segments of the full layers {tuple(shape.full_layers)}")


# --- canonical form ---------------------------------------------------------------------------------------------------


def _digest(contract: Contract, rules: tuple[Rule, ...]) -> bytes:
    """Canonical JSON: keys sorted, no spaces, ASCII."""
    values = {name: _plain(getattr(contract, name)) for name, rule in RULES.items() if rule in rules}
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode("ascii")).digest()


def _plain(value: Any) -> Any:
    if isinstance(value, Topology):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [{"name": v[0], "bytes": v[1]} if isinstance(v, tuple) else v for v in value]
    return value


def _typed(name: str, kind: object, value: Any) -> Any:
    """`value` as a field of type `kind`, or `ProtocolError`."""
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32:
        return value
    if kind is str and isinstance(value, str) and len(value) <= MAX_TEXT:
        return value
    if kind is Topology and isinstance(value, Mapping):
        hints = get_type_hints(Topology)
        return Topology(**{part: _typed(f"{name}.{part}", hints[part], value.get(part)) for part in hints})
    if isinstance(value, list | tuple) and kind not in (bool, int, str, Topology) and len(value) <= MAX_ENTRIES:
        return tuple(_entry(f"{name}[{i}]", kind, entry) for i, entry in enumerate(value))
    raise ProtocolError(f"contract.{name}: {str(value)[:80]!r} is no value of this field", field=f"contract.{name}")


def _entry(name: str, kind: object, value: Any) -> Any:
    if kind == SegmentSizes:
        pair = value if isinstance(value, Mapping) else {}
        return _typed(f"{name}.name", str, pair.get("name")), _typed(f"{name}.bytes", int, pair.get("bytes"))
    return _typed(name, str, value)
