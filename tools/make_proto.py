"""Generates pdkv/v1 from proto/pdkv/v1, or with --check says whether what is committed is what would be generated.

Guarantees: the generated files are protoc's own output, never edited; a check writes nothing into the tree and exits
with 1, naming each file that is stale, missing or left over.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = {"grpcio-tools": "1.85.1", "mypy-protobuf": "5.1.0"}
"""The generators' versions show in their output: another version would make every file stale."""
PLUGINS = ("mypy", "mypy_grpc")
"""Type stubs, so that the code around the generated one is checked strictly."""
GENERATED = re.compile(r".*_pb2(_grpc)?\.pyi?$")


def generate(out: Path) -> None:
    """Run protoc over all .proto files; `out` gets pdkv/v1/*_pb2.py, *_pb2.pyi, *_pb2_grpc.py and *_pb2_grpc.pyi."""
    sources = sorted((ROOT / "proto").rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    command += [f"--plugin=protoc-gen-{name}={Path(sys.executable).parent / f'protoc-gen-{name}'}" for name in PLUGINS]
    command += [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    command += [f"--{name}_out=quiet:{out}" for name in PLUGINS]
    subprocess.run([*command, *map(str, sources)], check=True)


def stale(fresh: Path, committed: Path) -> list[str]:
    """Names of generated files that differ between two folders, or stand in one only."""
    names = {p.name for folder in (fresh, committed) for p in folder.iterdir() if GENERATED.match(p.name)}
    return [name for name in sorted(names) if _text(fresh / name) != _text(committed / name)]


def _text(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if a file is stale")
    check = parser.parse_args(arguments).check
    for package, wanted in PINS.items():
        if version(package) != wanted:
            print(f"{package} is {version(package)}; this needs {wanted}: pip install {package}=={wanted}")
            return 2
    committed = ROOT / "pdkv" / "v1"
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "pdkv" / "v1"
        names = stale(fresh, committed)
        if check:
            for name in names:
                print(f"stale: pdkv/v1/{name} (run tools/make_proto.py)")
            return 1 if names else 0
        for name in names:
            if (fresh / name).exists():
                (committed / name).write_text((fresh / name).read_text("utf-8"), "utf-8")
            else:
                (committed / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
