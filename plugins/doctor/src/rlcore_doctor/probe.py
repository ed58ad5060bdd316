"""`python -m rlcore_doctor.probe MODULE`: import a module, and print its version and what it says of devices, as JSON."""

import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

MAX_CHARACTERS = 300
"""Most characters of an error's message."""


def probe(module: str) -> dict[str, Any]:
    """Import a module and return its version, the seconds that took, and of torch its CUDA and devices; or the error,
    and the packages that it went through."""
    begun = time.monotonic()
    try:
        loaded = importlib.import_module(module)
        found = {"version": str(getattr(loaded, "__version__", "")), "seconds": round(time.monotonic() - begun, 1)}
        return found | (_torch_devices(loaded) if module == "torch" else {})
    except BaseException as error:  # whatever a module raises that is imported, such as a panic in Rust
        cause: BaseException = error
        for _ in range(8):  # an error may be its own cause
            cause = cause.__cause__ or cause
        texts = dict.fromkeys(f"{type(one).__name__}: {' '.join(str(one).split()):.{MAX_CHARACTERS}}" for one in (error, cause))
        return {"error": "; caused by ".join(texts), "raised_in": sorted({*_modules_of(error), *_modules_of(cause)})}


def _modules_of(error: BaseException) -> Iterator[str]:
    """Yield the packages that an error went through, and the one that an import did not find, by their import names."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield str(frame.f_globals.get("__name__", "")).partition(".")[0]
    yield str(getattr(error, "name", None) or "").partition(".")[0]


def _torch_devices(torch: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda,
        "devices": torch.cuda.device_count() if usable else 0,
        "warning": " ".join(" ".join(str(one.message).split()) for one in told),
    }


def main() -> None:
    """Print the result on the standard output; what the module prints goes to the standard error."""
    own = os.dup(1)
    os.dup2(2, 1)
    result = json.dumps(probe(sys.argv[1]))
    os.write(own, result.encode())
    os._exit(0)  # threads of a library may keep the interpreter from ending


if __name__ == "__main__":
    main()
