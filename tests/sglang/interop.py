"""pdkv against SGLang's own code on CPU: `make sglang-interop`. Prints one JSON object; ends with 0 only if everything
held.

Page hashes, events over ZMQ in SGLang's types, SGLang's trees given the same prompts, its subscriber and its publisher.
Nothing of SGLang is replaced. Every comparison has a case that it must not let pass.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
import time
from typing import Any

from tests.checks import Checks

CASES = ("hashes", "events", "trees", "subscriber")
"""Each a module beside this one, with a `run`."""
MODULES = (
    "disaggregation.kv_events",
    "mem_cache.utils",
    "mem_cache.events",
    "mem_cache.radix_cache",
    "mem_cache.unified_radix_cache",
    "mem_cache.rust_tree_core.adapter",
    "mem_cache.storage.umbp.umbp_store",
)
"""What is tested against, below sglang.srt."""


def importable(module: str) -> str:
    """Empty, or why it isn't."""
    try:
        importlib.import_module(f"sglang.srt.{module}")
    except Exception as error:  # somebody else's code: it may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    options = parser.parse_args()
    checks, began_s = Checks(), time.monotonic()
    versions = {name: importlib.metadata.version(name) for name in ("sglang", "torch", "msgspec", "pyzmq")}
    report: dict[str, Any] = {"versions": versions}
    why = {module: importable(module) for module in MODULES}
    report["imports"] = {module: error or "imported" for module, error in why.items()}
    for module, error in why.items():
        checks.that(not error, f"sglang.srt.{module} is imported on CPU {error}".rstrip())
    for name in options.only.split(","):
        try:
            report[name] = importlib.import_module(f"tests.sglang.{name}").run(checks)
        except Exception as error:  # as above; the others go on
            checks.that(False, f"{name}: {type(error).__name__}: {error}")
    report |= {"checks": checks.passed, "failed": checks.failed, "seconds": round(time.monotonic() - began_s, 1)}
    print(json.dumps(report, indent=1))
    return bool(checks.failed)


if __name__ == "__main__":
    sys.exit(main())
