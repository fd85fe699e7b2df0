"""`torch.distributed.checkpoint` with Tessera: digests, commits in one step, and loads that run nothing.

    import tessera.torch

    tessera.torch.save(state, checkpoint_id="run/step400")
    tessera.torch.load(state, checkpoint_id="run/step400")

    tessera.torch.install()     # or: programs that call torch's own functions get it, too
"""

from tessera.torch import _version

_version.check()

from tessera.torch._async import async_save  # noqa: E402
from tessera.torch._install import install  # noqa: E402
from tessera.torch._keys import IncompatibleKeys  # noqa: E402
from tessera.torch._load import load  # noqa: E402
from tessera.torch._planner import LoadPlanner  # noqa: E402
from tessera.torch._reader import FileSystemReader  # noqa: E402
from tessera.torch._save import save  # noqa: E402
from tessera.torch._writer import FileSystemWriter  # noqa: E402

__all__ = [
    "FileSystemReader",
    "FileSystemWriter",
    "IncompatibleKeys",
    "LoadPlanner",
    "async_save",
    "install",
    "load",
    "save",
]
