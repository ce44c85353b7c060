"""What can be asked of `pdkv plan`: a field is an option.

Guarantees: an option's help, default and group stand here and nowhere else; the rest of the command gets them as one
value, checked for what belongs together; `ConfigError` names the option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

from typer import Option

from pdkv.errors import ConfigError

GPUS_PANEL = "On GPUs"
MORE_PANEL = "Also say"
DIAGNOSE_PANEL = "What is wrong with it"
OF_CARDS = ("gpus", "tp", "dp", "ep", "pp", "weights", "mem_fraction_static", "reserve")
"""Options of a pool whose memory follows from cards and weights."""
OF_PLANS = ("details", "hit", "short_requests", "plot")
"""Options of what a plan says, and an answer to a complaint doesn't."""


def _gpus(words: str) -> Any:
    return Option(help=words, rich_help_panel=GPUS_PANEL, show_default=False)


def _more(words: str, *names: str) -> Any:
    return Option(*names, help=words, rich_help_panel=MORE_PANEL)


def _diagnose(words: str) -> Any:
    return Option(help=words, rich_help_panel=DIAGNOSE_PANEL, show_default=False)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The command line, one field an option."""

    model: Annotated[str | None, Option(help="Preset, path of a config.json, or a directory with one.")] = None
    context: Annotated[list[int] | None, Option(help="Prompt tokens; repeat for several.")] = None
    memory: Annotated[str | None, Option(help="Memory of the pool: bytes, 56GB (1000^3) or 56GiB.")] = None
    main_row: Annotated[
        str | None, Option(help="Main-KV row: fp8_ds_mla, fp8, bf16 or nvfp4 [default: fp8_ds_mla].")
    ] = None
    draft_layers: Annotated[int | None, Option(help="MTP layers kept in the pool [default: the config's].")] = None
    draft_tokens: Annotated[int, Option(help="Drafts that a decode step verifies, beside the token itself.")] = 0
    output_tokens: Annotated[int, Option(help="Tokens to leave room for beside the prompt.")] = 256

    gpu: Annotated[
        str | None, _gpus("h100, h20, h200, b200, gb200, b300, or a card's memory such as 141GiB; instead of --memory.")
    ] = None
    gpus: Annotated[int | None, _gpus("Cards of a deployment: tp x dp x pp [default: that product].")] = None
    tp: Annotated[int | None, _gpus("Cards that share one attention [default: gpus / dp / pp].")] = None
    dp: Annotated[int | None, _gpus("Attentions side by side, each with its own pool [default: 1].")] = None
    ep: Annotated[int | None, _gpus("Cards that the experts are spread over [default: tp x dp].")] = None
    dcp: Annotated[int, _gpus("Cards that share the main rows of one context [default: 1].")] = 1
    pp: Annotated[int | None, _gpus("Pipeline stages [default: 1].")] = None
    weights: Annotated[str | None, _gpus("fp8 or bf16 [default: fp8].")] = None
    mem_fraction_static: Annotated[float | None, _gpus("Share for weights, buffers and pages [default: 0.9].")] = None
    reserve: Annotated[str | None, _gpus("Static memory for anything else, such as 2GB [default: 0].")] = None

    details: Annotated[bool, _more("All sections: what-ifs, workspaces, traffic, tables.", "--details")] = False
    hit: Annotated[int | None, _more("Tokens of a prefix hit: what it saves, and what not.")] = None
    short_requests: Annotated[int | None, _more("Requests whose tail pages to count.")] = None
    chunk_tokens: Annotated[int, _more("Tokens of the largest prefill step.")] = 32_768
    requests: Annotated[int, _more("Requests that decode together: page tables, rows of scores.")] = 32
    groups: Annotated[int, _more("Page tables a request: 1 where both caches share page ids, 2 where not.")] = 1
    gbps: Annotated[float, _more("Rate of the link, Gbit/s.")] = 400.0
    json: Annotated[bool, _more("Print one JSON object, with all sections.", "--json")] = False
    plot: Annotated[str | None, _more("Write a picture (.png, .svg or .pdf) as well; needs matplotlib.")] = None

    diagnose: Annotated[
        str | None, _diagnose("pool, refused, ttft or step, or all that there are numbers for [default with --node].")
    ] = None
    given: Annotated[list[str] | None, _diagnose("Numbers for it: key=value,...; help says which keys.")] = None
    node: Annotated[str | None, _diagnose("host:port of a node to take numbers from, in plain text.")] = None
    probe: Annotated[
        int | None, _diagnose("Send that node's decode service prompts of so many random tokens, for ttft and step.")
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

    def _refuse(self, names: Iterable[str], allowed: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ConfigError(name, value, allowed)


def plan_command(run: Callable[[PlanOptions], None], doc: str) -> Callable[..., None]:
    """A typer command with the fields of `PlanOptions` as options."""

    def command(**given: Any) -> None:
        options = PlanOptions(**given)
        options.check()
        run(options)

    hints = get_type_hints(PlanOptions, include_extras=True)
    parameters = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(PlanOptions)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = doc
    return command
