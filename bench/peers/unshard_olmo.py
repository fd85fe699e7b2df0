"""ai2-olmo's own unsharding, saved as its scripts do: legacy|local SOURCE TARGET."""
import os
import pathlib
import sys
import time
import types

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # OLMo calls torch.load as it was before 2.6

import torch  # noqa: E402
from olmo import checkpoint  # noqa: E402

KINDS = {"legacy": checkpoint.TorchLegacyShardedCheckpointer, "local": checkpoint.LocalShardedCheckpointer}

if __name__ == "__main__":
    kind, source, target = sys.argv[1], *map(pathlib.Path, sys.argv[2:4])
    checkpointer = KINDS[kind](types.SimpleNamespace(save_overwrite=True), thread_count=2)
    begin = time.perf_counter()
    model, optim, train = checkpointer.unshard_checkpoint(source)
    target.mkdir()
    for name, part in (("model", model), ("optim", optim), ("train", train)):
        torch.save(part, target / f"{name}.pt")
    print(f"seconds {time.perf_counter() - begin:.3f}")
