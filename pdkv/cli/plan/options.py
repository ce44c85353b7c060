"""What can be asked of `pdkv plan`: a field is an option.

Guarantees: an option's help, default and group stand here and nowhere else; the rest of the command gets them as one
value, checked for what belongs together; `ConfigError` names the option.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from pdkv.cli.client import ClientOptions
from pdkv.errors import ConfigError
from pdkv.geometry.fleet import GPUS
from pdkv.geometry.model_config import PRESETS
from pdkv.geometry.row_format import MAIN_ROWS
from pdkv.geometry.weights import WEIGHT_DTYPES

DEFAULT_ROW = "fp8_ds_mla"
GPUS_PANEL = "On GPUs"
MORE_PANEL = "Also say"
DIAGNOSE_PANEL = "What is wrong with it"
OF_CARDS = ("gpus", "tp", "dp", "ep", "pp", "weights", "mem_fraction_static", "reserve")
"""Options of a pool whose memory follows from cards and weights."""
OF_PLANS = ("details", "hit", "short_requests", "plot")
"""Options of what a plan says, and an answer to a complaint doesn't."""


def _plain(metavar: str, words: str) -> Any:
    return Option(metavar=metavar, help=words)


def _gpus(metavar: str, words: str) -> Any:
    return Option(metavar=metavar, help=words, rich_help_panel=GPUS_PANEL, show_default=False)


def _more(metavar: str, words: str, *names: str) -> Any:
    return Option(*names, metavar=metavar, help=words, rich_help_panel=MORE_PANEL)


def _diagnose(metavar: str, words: str) -> Any:
    return Option(metavar=metavar, help=words, rich_help_panel=DIAGNOSE_PANEL, show_default=False)


ROWS = "|".join(MAIN_ROWS)
CARDS = "|".join((*GPUS, "SIZE"))
ROW_WORDS = f"Row format of main KV. Default: {DEFAULT_ROW}; of a --node without --model the node's."
MODEL_WORDS = f"{', '.join(PRESETS)}, path of a config.json, or a directory with one. Required, but with --node."


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ClientOptions):
    """The command line, one field an option."""

    model: Annotated[str | None, _plain("MODEL", MODEL_WORDS)] = None
    context: Annotated[
        list[int] | None,
        _plain("TOKENS", "Tokens of a prompt; repeat for several. Default: usual lengths, and the model's longest."),
    ] = None
    memory: Annotated[str | None, _plain("SIZE", "Memory of the pool: bytes, 56GB (1000^3) or 56GiB (1024^3).")] = None
    main_row: Annotated[str | None, _plain(ROWS, ROW_WORDS)] = None
    draft_layers: Annotated[
        int | None, _plain("N", "MTP layers with rows in the pool, at least 0. Default: the config's.")
    ] = None
    draft_tokens: Annotated[int, _plain("N", "Drafts that a decode step verifies, beside the token itself.")] = 0
    output_tokens: Annotated[int, _plain("TOKENS", "To leave room for beside the prompt.")] = 256

    gpu: Annotated[
        str | None, _gpus(CARDS, "The card, by name or by its memory such as 141GiB; instead of --memory.")
    ] = None
    gpus: Annotated[int | None, _gpus("N", "Cards of a deployment. Default: tp x dp x pp.")] = None
    tp: Annotated[int | None, _gpus("N", "Cards that share one attention. Default: gpus / dp / pp.")] = None
    dp: Annotated[int | None, _gpus("N", "Attentions side by side, each with its own pool. Default: 1.")] = None
    ep: Annotated[int | None, _gpus("N", "Cards that the experts are spread over. Default: tp x dp.")] = None
    dcp: Annotated[int, _gpus("N", "Cards that share the main rows of one context. Default: 1.")] = 1
    pp: Annotated[int | None, _gpus("N", "Pipeline stages. Default: 1.")] = None
    weights: Annotated[str | None, _gpus("|".join(WEIGHT_DTYPES), "Kind of weights. Default: fp8.")] = None
    mem_fraction_static: Annotated[
        float | None, _gpus("SHARE", "Of a card, for weights, buffers and pages: above 0, at most 1. Default: 0.9.")
    ] = None
    reserve: Annotated[str | None, _gpus("SIZE", "Static memory for anything else, such as 2GB. Default: 0.")] = None

    details: Annotated[bool, _more("", "All sections: what-ifs, workspaces, traffic, page tables.", "--details")] = (
        False
    )
    hit: Annotated[int | None, _more("TOKENS", "Of a prefix hit: what it saves, and what not.")] = None
    short_requests: Annotated[int | None, _more("N", "Requests whose tail pages to count.")] = None
    chunk_tokens: Annotated[int, _more("TOKENS", "Of the largest prefill step.")] = 32_768
    requests: Annotated[int, _more("N", "Requests that decode together: page tables, rows of scores.")] = 32
    groups: Annotated[int, _more("N", "Page tables a request: 1 where both caches share page ids, 2 where not.")] = 1
    gbps: Annotated[float, _more("X", "Rate of the link, Gbit/s.")] = 400.0
    json: Annotated[bool, _more("", "Print one JSON object, with all sections.", "--json")] = False
    plot: Annotated[str | None, _more("PATH", "Write a picture as well: .png, .svg or .pdf.")] = None

    diagnose: Annotated[
        str | None,
        _diagnose("pool|refused|ttft|step|all", "The complaint; all: those that there are numbers for. Default: all."),
    ] = None
    given: Annotated[
        list[str] | None, _diagnose("KEY=VALUE,...", "Numbers for it, by the keys above; may be repeated.")
    ] = None
    node: Annotated[str | None, _diagnose("HOST:PORT", "Of a node to take numbers from.")] = None
    probe: Annotated[
        int | None,
        _diagnose(
            "TOKENS",
            "Send that node's decode service prompts of so many random tokens, at least 1024, for ttft and step.",
        ),
    ] = None

    @property
    def complains(self) -> bool:
        """Whether a complaint is to be answered, and not a plan to be made."""
        return self.diagnose is not None or self.node is not None

    def check(self) -> None:
        """Raises `ConfigError` for an option that another one contradicts, or leaves without effect."""
        if self.model is None and self.node is None:
            raise ConfigError("model", None, "a preset or path; only a node (--node) says itself what it holds")
        if self.gpu is not None and self.memory is not None and not self.complains:
            raise ConfigError("memory", self.memory, "either --memory or --gpu: a card's pool follows from the weights")
        if self.gpu is None or self.memory is not None or self.model is None:
            self._refuse(OF_CARDS, "only with --gpu and --model, and without --memory: they say what weights leave")
        if self.complains:
            self._refuse(OF_PLANS, "without --diagnose and --node: an answer has none of it")
        else:
            self._refuse(("given", "probe"), "only with --diagnose or --node")
        if self.node is None:
            self._refuse(("probe",), "only with --node")
        else:
            self.security()

    def _refuse(self, names: Iterable[str], allowed: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ConfigError(name, value, allowed)
