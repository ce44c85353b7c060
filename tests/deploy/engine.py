"""podman as `docker`, on machines that aren't made for it: without privileges over limits, without Docker's registries.

Guarantees: containers, images and networks are in a folder of their own, and `docker …` of a page's commands runs as it
is written there; what a build takes from this machine (pip's mirrors, the CA bundle) is mounted, not copied.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.cluster import ROOT

TOOLS = {
    "podman": "podman",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "buildah": "buildah",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "tc": "iproute2",
}
"""And the Debian package that each is in. Without aardvark-dns containers don't find each other by name, and podman
doesn't say so."""
SUITE = "bookworm"
BASE = f"localhost/debian:{SUITE}"
CA = "/run/ca.crt"


class NotPossible(Exception):
    """What this machine lacks, and the way out."""


def needed() -> None:
    """Raises `NotPossible`."""
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        raise NotPossible(f"no {', '.join(missing)}: apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        raise NotPossible("needs root: networks are shaped and limits are set")


def limits(**more: int) -> list[str]:
    """As high as this process may set them; the engine's own defaults are higher than it may."""
    most = {"nofile": (resource.RLIMIT_NOFILE, 20_000), "nproc": (resource.RLIMIT_NPROC, 32_768)}
    here = {name: (resource.getrlimit(kind)[1], top) for name, (kind, top) in most.items()}
    wanted = {name: top if hard == resource.RLIM_INFINITY else min(hard, top) for name, (hard, top) in here.items()}
    return [f"{name}={count}:{count}" for name, count in (wanted | more).items()]


@dataclass(frozen=True)
class Engine:
    """`folder` keeps base and layers for the next time."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir(parents=True, exist_ok=True)
        files = {
            "containers.conf": f"[containers]\ndefault_ulimits = {json.dumps(limits())}\n[engine]\n"
            'runtime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            # said, as podman keeps to what it found when the folder was new
            '[network]\nnetwork_backend = "netavark"\n',
            "storage.conf": f'[storage]\ndriver = "overlay"\ngraphroot = "{self.folder}/storage"\n'
            f'runroot = "{self.folder}/run"\n',
            "pip.conf": "[global]\n" + "".join(f"{key} = {value}\n" for key, value in self._pip().items()),
            "bin/docker": self._docker(),
        }
        for name, text in files.items():
            (self.folder / name).write_text(text, "utf-8")
        (self.folder / "bin/docker").chmod(stat.S_IRWXU)
        self.environment.update(
            os.environ
            | {
                "CONTAINERS_CONF": f"{self.folder}/containers.conf",
                "CONTAINERS_STORAGE_CONF": f"{self.folder}/storage.conf",
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            }
        )

    def run(self, *command: str, timeout_s: float = 600, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
        )
        # podman has health checks run by systemd, and complains where there is none
        done.stderr = "".join(line for line in done.stderr.splitlines(True) if "systemd connection" not in line).strip()
        words = f"{shlex.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert not check or done.returncode == 0, words
        return done

    def docker(self, *args: str, timeout_s: float = 600) -> str:
        return self.run("docker", *args, timeout_s=timeout_s).stdout.strip()

    def inspect(self, name: str, kind: str = "container") -> Any:
        (found,) = json.loads(self.docker("inspect", "--type", kind, name))
        return found

    def base(self) -> str:
        """A Debian as debootstrap makes it, with nothing in it that tells when."""
        if self.run("docker", "image", "exists", BASE, check=False).returncode == 0:
            return BASE
        root = self.folder / "base"
        shutil.rmtree(root, ignore_errors=True)
        self.run("debootstrap", "--variant=minbase", SUITE, str(root), timeout_s=1800)
        tar = f"tar -C {root} --exclude=./var/cache/apt/*.bin --exclude=./var/cache/apt/archives/*.deb"
        tar += " --exclude=./var/lib/apt/lists/* --exclude=./var/log/* --exclude=./etc/machine-id --exclude=./dev/*"
        tar += " --sort=name --mtime=@0 --numeric-owner -c ."
        self.run("bash", "-euo", "pipefail", "-c", f"set -f; {tar} | podman import - {BASE}", timeout_s=1800)
        shutil.rmtree(root)
        return BASE

    def remove(self, containers: Sequence[str] = (), networks: Sequence[str] = ()) -> None:
        """Whether they are there or not."""
        for name in containers:
            self.run("docker", "rm", "--force", "--time", "0", name, check=False)
        for name in networks:
            self.run("docker", "network", "rm", "--force", name, check=False)

    def _docker(self) -> str:
        # of the last change to what the image is made by: a layer that is kept has the date that a new one would have
        asked = ["git", "log", "-1", "--format=%ct", "--", "deploy/docker"]
        epoch = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        build = ["nice", "-n", "19", "buildah", "build", "--format=docker", "--isolation=oci", "--runtime=runc"]
        build += ["--layers", f"--timestamp={epoch}", f"--build-arg=SOURCE_DATE_EPOCH={epoch}", "--network=host"]
        build += [f"--build-arg=BASE={BASE}"]
        build += ["--ignorefile=deploy/docker/Dockerfile.dockerignore", *(f"--ulimit={limit}" for limit in limits())]
        if "find-links" in self._pip():
            build.append("--build-arg=TORCH=torch==2.13.0 --no-deps")
        build += [f"--volume={at}:{to}:ro" for at, to in self._mounts()]
        return f'#!/bin/sh\n[ "$1" = build ] || exec podman "$@"\nshift\nexec {shlex.join(build)} "$@"\n'

    def _mounts(self) -> list[tuple[str, str]]:
        found = [(f"{self.folder}/pip.conf", "/etc/pip.conf")]
        words = " ".join(value for key, value in self._pip().items() if key != "cert").replace("file://", "").split()
        folders = {str(Path("/", *Path(word).parts[1:3])) for word in words if word.startswith("/")}
        found += [(folder, folder) for folder in sorted(folders)]
        return found + [(at, CA) for at in [self._cert()] if at]

    @staticmethod
    def _settings() -> dict[str, str]:
        done = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=True)
        return {m[1]: m[2] for m in re.finditer(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", done.stdout, re.MULTILINE)}

    def _cert(self) -> str:
        return self._settings().get("cert", "")

    def _pip(self) -> dict[str, str]:
        """This machine's own settings, as far as they say where packages come from."""
        kept = ("index-url", "extra-index-url", "find-links", "trusted-host", "timeout")
        found = {key: value for key, value in self._settings().items() if key in kept}
        return found | ({"cert": CA} if self._cert() else {})
